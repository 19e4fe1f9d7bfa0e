"""External learners and environments, each with one mistake that is reported in one line."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.wrappers import TimeLimit

from riffle.common.mechanism.counters import Support
from riffle.common.mechanism.policy import Mixture
from riffle.common.mechanism.randomness import Randomness
from riffle.coordinator.learners.own import BatchCounts, Deployment, OwnLearner, Problem
from riffle.node_client.environments.gymnasium import GymnasiumEnvironment
from riffle.node_client.environments.tabular import (
    Declaration,
    Environment,
    TabularEnvironment,
    riverswim,
)

Whatever = Any  # a type checker would find these mistakes


class NoNext(OwnLearner):  # its class cannot be made
    pass


class NoLearner:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def observe(self, counts: BatchCounts) -> None: ...


class Once(OwnLearner):
    """Deploys the first policy for all episodes; correct."""

    def next_deployment(self) -> Deployment | None:
        return self.deploy(self.policy, self.left) if self.left else None


class Unsigned(Once):
    """Keeps its actions in the smallest type; correct too."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.policy = self.policy.astype(np.uint8)


class Raises(Once):
    def next_deployment(self) -> Deployment | None:
        return dict[str, Deployment]()["deployment"]  # the reported line


class RaisesInALibrary(Once):
    def next_deployment(self) -> Deployment | None:
        np.linalg.inv(np.zeros((2, 2)))  # the reported line
        return None


class ReturnsAPolicy(Once):
    def next_deployment(self) -> Whatever:
        return self.policy


class WrongN(Once):
    def next_deployment(self) -> Deployment | None:
        mixture = Mixture.single(self.policy)
        return Deployment(1, "fine", mixture, np.int64(5), None)  # type: ignore[arg-type]


class WrongLayer(Once):
    def next_deployment(self) -> Deployment | None:
        return self.deploy(self.policy, self.left, layer=self.problem.sizes.H)


class WrongPurpose(Once):
    def next_deployment(self) -> Deployment | None:
        return Deployment(1, "try", Mixture.single(self.policy), 1, None)  # type: ignore[arg-type]


class WrongMixture(Once):
    def next_deployment(self) -> Deployment | None:
        return Deployment(1, "fine", self.policy, 1, None)  # type: ignore[arg-type]


class WrongAction(Once):
    def next_deployment(self) -> Deployment | None:
        return Deployment(1, "fine", Mixture.single(self.policy + 9), 1, None)


class RaisesInObserve(Once):
    def observe(self, counts: BatchCounts) -> None:
        counts.transitions[99]  # the reported line


class ReturnsCounts(Once):
    def observe(self, counts: BatchCounts) -> Whatever:
        super().observe(counts)
        return counts


class ForgetsToCount(Once):
    def next_deployment(self) -> Deployment | None:
        return self.deploy(self.policy, 15) if self.left else None

    def observe(self, counts: BatchCounts) -> None:
        self.improve(counts)


class WrongAnswer(Once):
    def observe(self, counts: BatchCounts) -> None:
        super().observe(counts)
        self.policy = self.policy * 0.5  # type: ignore[assignment]


class ListedAnswer(Once):
    def observe(self, counts: BatchCounts) -> None:
        super().observe(counts)
        self.policy = [[0, 0], [0]]  # type: ignore[assignment]


class UnsayableAnswer(Once):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, made_of=problem)  # type: ignore[arg-type]


# -- environments ---------------------------------------------------------------------------------


class World(TabularEnvironment):
    """RiverSwim; correct."""

    def __init__(self) -> None:
        super().__init__(riverswim(3, 3))


def raises(states: int = 3) -> Environment:
    return dict[int, Environment]()[states]  # the reported line


def returns_a_dict() -> Whatever:
    return {"states": 3}


def returns_nothing() -> None:
    World()


class NativeWorld:
    """A Gymnasium environment without its adapter."""

    observation_space, action_space = range(3), range(2)

    def reset(self) -> None: ...

    def step(self, action: int) -> None: ...


class RaisingWorld(World):
    def __getattribute__(self, name: str) -> Whatever:
        if name == "reward_range":
            raise KeyError(name)  # the reported line
        return super().__getattribute__(name)


class Changed(World):
    """A world with some members replaced."""

    def __init__(self, **member: Whatever) -> None:
        super().__init__()
        vars(self).update(member)


def tupled_sizes() -> Environment:
    return Changed(sizes=(3, 2, 3))


def upside_down() -> Environment:
    return Changed(reward_range=(1.0, 0.0))


def worded_range() -> Environment:
    return Changed(reward_range=(0.0, "1"))


def wrong_end() -> Environment:
    return Changed(absorbing=3)


def listed_support() -> Environment:
    tables: Whatever = [[[[0], [0]]] * 3]
    return Changed(declaration=Declaration(Support((0,), tables)))


def halved_support() -> Environment:
    table: Whatever = (((0.5,), (0,)),) * 3
    return Changed(declaration=Declaration(Support((0,), (table,))))


def worded_steps() -> Environment:
    answer: Whatever = "no"
    return Changed(declaration=Declaration(homogeneous=answer))


def wrong_model() -> Environment:
    return Changed(mdp=riverswim(4, 3))


def wrong_declaration() -> Environment:
    return Changed(declaration=True)


def impossible_support() -> Environment:
    return Changed(declaration=Declaration(Support((3,), ())))


class FailingWorld(World):
    def step(self, action: int, randomness: Randomness) -> tuple[int, float, bool]:
        state, reward, over = super().step(action, randomness)
        if state == 1:
            raise KeyError(action)  # the reported line
        return state, reward, over


class FailingGymnasium(gymnasium.Env[Any, Any]):
    observation_space, action_space = Discrete(3), Discrete(2)

    def reset(self, *, seed: int | None = None, options: object = None) -> Whatever:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: int) -> Whatever:
        if self.np_random.random() < 0.1:
            raise KeyError(action)  # the reported line
        return 1, 0.0, False, False, {}


def failing_gymnasium() -> Environment:
    return GymnasiumEnvironment(TimeLimit(FailingGymnasium(), 3), 3, 0.0, 1.0)
