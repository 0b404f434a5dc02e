"""Settings: sources, refusals, names."""

from __future__ import annotations

import difflib
import importlib

import pytest

from services.common import setting_names
from services.common.errors import ConfigError
from services.common.settings import ServiceSettings, check_names, is_service_link

SETTINGS_MODULES = ("cli.settings", "services.gateway.settings", "services.gpu_worker.settings", "services.cpu_expert.settings")


def settings_classes() -> list[type[ServiceSettings]]:
    for module in SETTINGS_MODULES:
        importlib.import_module(module)
    found: list[type[ServiceSettings]] = []
    todo = [ServiceSettings]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return [cls for cls in found if not cls.__module__.startswith("tests.")]


def test_every_name_belongs_to_a_settings_class() -> None:
    """The list of known names equals the union of all settings classes."""
    declared = {str(field.validation_alias) for cls in settings_classes() for field in cls.model_fields.values()}
    assert declared == setting_names.ALL


def test_every_field_is_described() -> None:
    """Every setting has a description for the settings table."""
    missing = [(cls.__name__, name) for cls in settings_classes() for name, field in cls.model_fields.items() if not field.description]
    assert missing == []


def test_a_typo_is_refused_with_the_closest_name() -> None:
    """An unknown GLM53_ name refuses to start and suggests the closest known one."""
    with pytest.raises(ConfigError, match="GLM53_MODEL_DIRS: did you mean GLM53_MODEL_DIR") as caught:
        ServiceSettings.load({"GLM53_MODEL_DIRS": "/x"})
    assert caught.value.param == "GLM53_MODEL_DIRS"


def slips(word: str) -> set[str]:
    """What becomes of a name when a letter is forgotten, doubled, or changes places with the next."""
    at = range(len(word))
    return {
        *(word[:i] + word[i + 1 :] for i in at),
        *(word[:i] + word[i] + word[i:] for i in at),
        *(word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :] for i in at),
    }


@pytest.mark.parametrize("name", sorted(setting_names.PREFIXED))
def test_every_slip_of_a_name_is_offered_a_known_one(name: str) -> None:
    """A letter more, less or misplaced: some setting with nearly that name is offered, mostly the one that was meant."""
    for slip in slips(name.removeprefix("GLM53_")):
        if (typed := f"GLM53_{slip}") in setting_names.PREFIXED or is_service_link(typed):
            continue
        with pytest.raises(ConfigError, match=f"unknown setting {typed}: did you mean ") as caught:
            check_names({typed: "1"})
        offered = caught.value.message.partition("did you mean ")[2].partition("?")[0]
        assert offered in setting_names.ALL
        assert difflib.SequenceMatcher(None, offered, typed).ratio() >= difflib.SequenceMatcher(None, name, typed).ratio() - 0.05


@pytest.mark.parametrize("word", ["FOO", "X", "DEBUG", "TENSOR_PARALLEL", "GPU_MEMORY_UTILIZATION", "API_KEY", "BANANA", ""])
def test_a_name_that_is_like_none_is_offered_none(word: str) -> None:
    """A suggestion that has nothing to do with the name sends people the wrong way."""
    with pytest.raises(ConfigError, match=f"unknown setting GLM53_{word}: no setting has a name like it, docs/settings.md has all"):
        check_names({f"GLM53_{word}": "1"})


def test_a_prefix_too_many_is_told() -> None:
    """HOST, PORT and SERVED_NAME have none."""
    with pytest.raises(ConfigError, match="unknown setting GLM53_SERVED_NAME: did you mean SERVED_NAME"):
        check_names({"GLM53_SERVED_NAME": "glm"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLM53_GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("GLM53_GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("GLM53_GATEWAY_SERVICE_PORT_HTTP", "80"),
        ("GLM53_GATEWAY_PORT_80_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_kubernetes_service_links_are_ignored(name: str, value: str) -> None:
    """Variables that Kubernetes injects for a service named glm53-… are not settings."""
    assert is_service_link(name)
    check_names({name: value})


def test_the_source_of_every_value_is_told() -> None:
    """A flag beats the environment, the environment beats the default, and describe() says which it was."""
    settings = ServiceSettings.load({"GLM53_LOG_LEVEL": "debug", "GLM53_INSTANCE": "a"}, instance="b")
    rows = {name: (value, source) for name, value, source in settings.describe()}
    assert rows["GLM53_LOG_LEVEL"] == ("debug", "environment")
    assert rows["GLM53_INSTANCE"] == ("b", "command line")
    assert rows["GLM53_LOG_FORMAT"] == ("console", "default")


def test_a_bad_value_names_the_variable() -> None:
    """A value of the wrong kind is refused under its environment name."""
    with pytest.raises(ConfigError, match="GLM53_LOG_LEVEL"):
        ServiceSettings.load({"GLM53_LOG_LEVEL": "loud"})


def test_settings_are_frozen() -> None:
    """Settings are read, never written."""
    settings = ServiceSettings.load({})
    with pytest.raises(Exception, match="frozen"):
        settings.instance = "other"  # type: ignore[misc]
