"""What is said of a setting's value that cannot be used: the setting, what it accepts, and the value."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import Field, SecretStr

from cli.settings import ServeSettings
from services.common.accepted import NOT_OFFERED, accepted, shown
from services.common.errors import ConfigError
from services.common.settings import ServiceSettings
from services.cpu_expert.settings import CpuExpertSettings
from services.gateway.settings import GatewaySettings
from services.gpu_worker.settings import GpuWorkerSettings

CLASSES: tuple[type[ServiceSettings], ...] = (ServiceSettings, ServeSettings, GatewaySettings, GpuWorkerSettings, CpuExpertSettings)
FIELDS = [(cls, name) for cls in CLASSES for name in cls.model_fields]
# No setting accepts all of these; one of plain text accepts them all.
WRONG = ("what is this?", "-7", "99999999999999", "2.5", "nan", "maybe", "ä/b\n")


def refusals(cls: type[ServiceSettings], alias: str) -> list[tuple[str, ConfigError]]:
    found = []
    for value in WRONG:
        try:
            cls.load({alias: value})
        except ConfigError as error:
            found.append((value, error))
    return found


def literals(kind: Any) -> list[Any]:
    """Every word of a type, those in unions too."""
    return [*get_args(kind)] if get_origin(kind) is Literal else [word for member in get_args(kind) for word in literals(member)]


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.service}-{name}" for cls, name in FIELDS])
def test_every_refusal_names_setting_value_and_what_is_accepted(cls: type[ServiceSettings], name: str) -> None:
    """In words: no regular expression, no type of a library, every word of a choice and every bound of a number."""
    field = cls.model_fields[name]
    alias = str(field.validation_alias)
    for value, error in refusals(cls, alias):
        message = error.message
        assert alias in message
        assert shown(value) in message or repr(value) in message
        assert not re.search(r"Input should|String should|valid (boolean|integer|number)|unable to|pattern|\^|\\d|\{\d", message)
        if not re.search(r"need (a |an |auto)|need [01] or", message):
            continue
        for word in literals(field.annotation):
            assert (str(word) in message) is (word not in NOT_OFFERED), message


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.service}-{name}" for cls, name in FIELDS])
def test_a_setting_with_a_pattern_says_it_in_words(cls: type[ServiceSettings], name: str) -> None:
    """With an example that it accepts."""
    patterns = [found for item in cls.model_fields[name].metadata if (found := getattr(item, "pattern", None))]
    if patterns:
        example = accepted(cls, name).rpartition("e.g. ")[2]
        assert example
        assert re.fullmatch(patterns[0], example)


@pytest.mark.parametrize("value", ["auto", "off", "1", "8"])
def test_what_the_words_offer_is_taken(value: str) -> None:
    """GLM53_EC_HINTS takes both words and both ends of its range."""
    assert str(GpuWorkerSettings.load({"GLM53_EC_HINTS": value}).ec_hints) == value


@pytest.mark.parametrize(
    ("cls", "alias", "value", "said"),
    [
        (GpuWorkerSettings, "GLM53_EC_HINTS", "0", "need auto, off or a whole number from 1 to 8 (it is 0)"),
        (GpuWorkerSettings, "GLM53_EC_HINTS", "9", "need auto, off or a whole number from 1 to 8 (it is 9)"),
        (GpuWorkerSettings, "GLM53_EC_HINTS", "many", "need auto, off or a whole number from 1 to 8 (it is many)"),
        (GpuWorkerSettings, "GLM53_CACHE_TOKENS", "300", "need a whole number of at least 256, a multiple of 256 (it is 300)"),
        (GpuWorkerSettings, "GLM53_CT_A", "slow", "need a number of at least 0 (it is slow)"),
        (GpuWorkerSettings, "GLM53_WATCHDOG_S", "0", "need a number above 0 and at most 3600 (it is 0)"),
        (GpuWorkerSettings, "GLM53_WARM_UP", "maybe", "need 1 or 0 (it is maybe)"),
        (GpuWorkerSettings, "GLM53_MODE", "turbo", "need auto, fast or exact (it is turbo)"),
        (ServeSettings, "GLM53_MODE", "turbo", "need auto, fast or exact (it is turbo)"),
        (ServeSettings, "PORT", "0", "need a whole number from 1 to 65535 (it is 0)"),
        (GpuWorkerSettings, "SERVED_NAME", "x" * 200, f"need text of at most 128 characters (it is {'x' * 80}…, 200 characters)"),
        (GpuWorkerSettings, "GLM53_MODEL_REVISION", "main", "need a commit's 40 digits of 0-9 and a-f, no branch and no tag, e.g. 33"),
        (GpuWorkerSettings, "GLM53_MODEL_REPO", "foo", "need owner/name of a repository"),
        # The supervisor's own field of that name has another pattern and the same words.
        (ServeSettings, "GLM53_INSTANCE", "a/b", "need 1 to 32 of a-z, 0-9 and - (not as the first), e.g. glm-a (it is a/b)"),
        (GatewaySettings, "GLM53_OTLP_ENDPOINT", "http", "e.g. http://collector:4318/v1/traces (it is http)"),
    ],
)
def test_the_words_of_each_kind(cls: type[ServiceSettings], alias: str, value: str, said: str) -> None:
    """Unions, bounds, choices, switches, lengths and patterns, read by whoever reads them first."""
    with pytest.raises(ConfigError, match=f"^{alias}: .*{re.escape(said)}") as caught:
        cls.load({alias: value})
    assert caught.value.param == alias


def test_modes_that_are_not_offered_keep_their_own_refusal() -> None:
    """They are read, so that the worker can say that they are not in this version."""
    for mode in NOT_OFFERED:
        assert GpuWorkerSettings.load({"GLM53_MODE": mode}).mode == mode


def test_a_refused_secret_is_not_shown() -> None:
    """A password in a URL does not belong into a log."""

    class Secretive(ServiceSettings):
        token: SecretStr = Field(SecretStr(""), validation_alias="GLM53_REDIS_URL", max_length=3)

    with pytest.raises(ConfigError) as caught:
        Secretive.load({"GLM53_REDIS_URL": "hunter2"})
    assert "hunter2" not in caught.value.message
