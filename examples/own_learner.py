"""A learner of one's own: try everything for a share of the episodes, then do what looked best.

    riffle simulate --learner examples/own_learner.py:ExploreThenCommit --option share=0.4
    riffle up --learner examples/own_learner.py:ExploreThenCommit --out runs/mine

Users are as private as with any other learner: this one, too, sees only private counts. A package
offers it under a name, for `--learner mine` and for an installed coordinator, by an entry point:

    [project.entry-points."riffle.learners"]
    mine = "my_package:ExploreThenCommit"
"""

from riffle import BatchCounts, Deployment, OwnLearner, Problem


class ExploreThenCommit(OwnLearner):
    """Deploys many policies for `share` of the K episodes, then the one that looks best."""

    def __init__(self, problem: Problem, share: float = 0.5) -> None:
        super().__init__(problem, share=share)
        self.exploring = round(share * problem.K)

    def next_deployment(self) -> Deployment | None:
        """First the explorers, then the best policy; None when no episode is left."""
        if self.batches == 0:
            return self.deploy(self.explorers(), self.exploring)
        return self.deploy(self.policy, self.left) if self.left else None

    def observe(self, counts: BatchCounts) -> None:
        """Learn from the explorers' counts."""
        super().observe(counts)
        if self.batches == 1:
            self.improve(counts)
