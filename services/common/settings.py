"""The one place where the environment is read.

Each service has one frozen settings object derived from `ServiceSettings`; it is made once, in `__main__`, and passed on.
Precedence: command-line overrides > environment > default. An unknown `GLM53_*` name refuses to start and names a known one that is close
to it: a typo must not silently become a default.
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
from services.common.accepted import accepted, shown
from services.common.errors import ConfigError

PREFIX = "GLM53_"
# How alike a name and the one that is offered for it have to be (difflib's ratio, without the prefix): a slip of one or two letters is, a
# name that merely shares some letters is not.
CLOSE = 0.75
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
        ConfigError: names the variable, and the known one that is close to it if there is one.
    """
    ignored = sorted(name for name in env if name.startswith(PREFIX) and is_service_link(name))
    if ignored:
        log.info("ignoring variables that look like kubernetes service links: %s", ", ".join(ignored))
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in setting_names.PREFIXED or name in ignored:
            continue
        close = _closest(name)
        hint = f"did you mean {close}?" if close else "no setting has a name like it, docs/settings.md has all of them."
        raise ConfigError(f"unknown setting {name}: {hint} Unset it or correct it.", param=name)


def _closest(name: str) -> str:
    """The known setting that `name` is a slip of, "" when there is none."""
    known = {full.removeprefix(PREFIX): full for full in sorted(setting_names.ALL)}
    found = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=CLOSE)
    return known[found[0]] if found else ""


class ServiceSettings(BaseSettings):
    """Base of every service's settings: frozen, one environment name per field (its `validation_alias`).

    Subclasses declare fields as ``name: type = Field(default, validation_alias="GLM53_NAME", description="…")``; one with a pattern also
    says what it accepts, see services/common/accepted.py.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore", case_sensitive=True, populate_by_name=True, hide_input_in_errors=True)
    service: ClassVar[str] = "service"

    instance: str = Field(
        "default",
        validation_alias="GLM53_INSTANCE",
        pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
        json_schema_extra={"accepts": "1 to 32 of a-z, 0-9 and - (not as the first), e.g. glm-a"},
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
            raise cls._refusal(error, values) from None
        settings._sources.update(sources)
        return settings

    @classmethod
    def _refusal(cls, error: ValidationError, values: Mapping[str, Any]) -> ConfigError:
        """The first thing that is wrong, with the setting, what it accepts and what it is."""
        first = error.errors(include_url=False)[0]
        ours = first["type"] == "value_error"  # said by a validator of ours
        said = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            return ConfigError(f"{cls.service}: {said}", param=cls.service)
        alias = str(first["loc"][0])
        name = next(name for name, field in cls.model_fields.items() if field.validation_alias == alias)
        if not ours:
            said = f"need {accepted(cls, name)}"
        value = "***" if cls.model_fields[name].annotation is SecretStr else shown(values.get(alias, ""))
        told = ours and (said.startswith(value) or repr(value) in said)
        return ConfigError(f"{alias}: {said}" if told else f"{alias}: {said} (it is {value})", param=alias)

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
