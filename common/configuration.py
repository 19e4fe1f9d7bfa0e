"""Settings of a role: environment variables under its prefix, all checked before it starts."""

from typing import Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

from common.descriptor import first_fault
from common.errors import LocalError


class RoleSettings(BaseSettings):
    """Base of the roles' settings. Build one with `load`, which explains what is wrong."""

    @classmethod
    def load(cls) -> Self:
        """Settings from the environment.

        Raises:
            LocalError: ``invalid-spec``, naming the variable that is missing or wrong.
        """
        prefix = cls.model_config.get("env_prefix", "")
        try:
            return cls()
        except SettingsError as error:  # a list or an object that is not JSON
            raise LocalError("invalid-spec", f"{prefix}*: {error}; give JSON") from error
        except ValidationError as error:
            raise LocalError("invalid-spec", f"{prefix}*: {first_fault(error)}") from error
