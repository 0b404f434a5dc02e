"""The one place where the environment is read.

Each service has one frozen settings object derived from `ServiceSettings`; it is made once, in `__main__`, and passed on.
Precedence: command-line overrides > environment > default. An unknown `GLM53_*` name refuses to start and names the closest known one:
a typo must not silently become a default.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.common import setting_names
from services.common.errors import ConfigError

PREFIX = "GLM53_"
log = logging.getLogger(__name__)

# Kubernetes injects GLM53_<SERVICE>_SERVICE_HOST, GLM53_<SERVICE>_PORT=tcp://… and the like for a service named glm53-…
_SERVICE_LINK = re.compile(r"^GLM53_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)$")


def environ() -> dict[str, str]:
    """A copy of the process environment: what `ServiceSettings.load` takes and what child processes are given."""
    return dict(os.environ)


def enter_root(root: str) -> None:
    """Makes the installation's folder (GLM53_ROOT) the current one, for this process and those that it starts; "" leaves it.

    Raises:
        ConfigError: it cannot be entered.
    """
    if not root:
        return
    try:
        os.chdir(root)
    except OSError as error:
        raise ConfigError(f"GLM53_ROOT={root} is no folder that can be entered: {error.strerror}", param="GLM53_ROOT") from None


def is_service_link(name: str) -> bool:
    """True for a variable that Kubernetes service links inject, e.g. GLM53_GATEWAY_PORT."""
    return name not in setting_names.PREFIXED and bool(_SERVICE_LINK.match(name))


def check_names(env: Mapping[str, str]) -> None:
    """Refuses an unknown `GLM53_*` name.

    Raises:
        ConfigError: names the variable and the closest known one.
    """
    ignored = sorted(name for name in env if name.startswith(PREFIX) and is_service_link(name))
    if ignored:
        log.info("ignoring variables that look like kubernetes service links: %s", ", ".join(ignored))
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in setting_names.PREFIXED or name in ignored:
            continue
        close = difflib.get_close_matches(name, sorted(setting_names.PREFIXED), n=1, cutoff=0.0)
        raise ConfigError(f"unknown setting {name}: did you mean {close[0]}? Unset it or correct it.", param=name)


class ServiceSettings(BaseSettings):
    """Base of every service's settings: frozen, one environment name per field (its `validation_alias`).

    Subclasses declare fields as ``name: type = Field(default, validation_alias="GLM53_NAME", description="…")``.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore", case_sensitive=True, populate_by_name=True, hide_input_in_errors=True)
    service: ClassVar[str] = "service"

    instance: str = Field(
        "default",
        validation_alias="GLM53_INSTANCE",
        pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
        description="Names this deployment's shared-memory segments: /dev/shm/glm53-<instance>-*. `glm53 serve` takes p<port>.",
    )
    shm_dir: str = Field("/dev/shm", validation_alias="GLM53_SHM_DIR", description="Where the shared-memory segments live (a tmpfs).")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", validation_alias="GLM53_LOG_LEVEL", description="Log level.")
    log_format: Literal["console", "json"] = Field(
        "console", validation_alias="GLM53_LOG_FORMAT", description="Log lines for people or JSON."
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes in: the environment arrives as an explicit mapping so that tests and `glm53 serve` control it."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Reads, checks and freezes the settings.

        Args:
            env: the environment; the process's own when None.
            overrides: field name → value from the command line; None means not given.

        Raises:
            ConfigError: names the variable at fault and what it accepts.
        """
        env = environ() if env is None else env
        check_names(env)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            alias = str(field.validation_alias)
            if overrides.get(name) is not None:
                values[alias], sources[name] = overrides[name], "command line"
            elif alias in env and env[alias] != "":
                values[alias], sources[name] = env[alias], "environment"
        unknown = set(overrides) - set(cls.model_fields)
        if unknown:
            raise TypeError(f"{cls.__name__} has no field {sorted(unknown)}")
        try:
            settings = cls(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else cls.service
            raise ConfigError(f"{name}: {first['msg'].removeprefix('Value error, ')}", param=name) from None
        settings._sources.update(sources)
        return settings

    def is_set(self, name: str) -> bool:
        """True when the field was given, in the environment or on the command line."""
        return name in self._sources

    def describe(self) -> list[tuple[str, str, str]]:
        """(environment name, value, source) of every field; secrets are masked."""
        rows = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            shown = "***" if isinstance(value, SecretStr) and value else str(value)
            rows.append((str(field.validation_alias), shown, self._sources.get(name, "default")))
        return rows
