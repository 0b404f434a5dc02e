"""The Prometheus files: valid, their rules do what they say, and they name what the services export."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.monitoring import PROMETHEUS, ROOT, RULES, own_names, program, recorded, rules
from tools import metrics_table

CONFIGS = sorted(PROMETHEUS.glob("*.yml"))
KUBERNETES = ROOT / "deploy" / "k8s" / "base" / "prometheus" / "prometheus.yml"


def promtool(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs Debian's promtool."""
    command = [program("promtool", "prometheus"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_are_valid(config: Path) -> None:
    """promtool accepts every configuration together with the rules that it loads."""
    checked = promtool("check", "config", config)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rule files found" in checked.stdout + checked.stderr


def test_the_rules_fire_when_they_should() -> None:
    """promtool's cases: what fires, when, with which words."""
    tested = promtool("test", "rules", "tests/rules_test.yml", cwd=PROMETHEUS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def alerts_noticed(folder: Path, change: Callable[[dict[str, str]], None]) -> tuple[set[str], set[str]]:
    """Changes every alert; those whose cases fail then, and all that were changed."""
    for name in ("rules", "tests"):
        shutil.copytree(PROMETHEUS / name, folder / name)
    path = folder / "rules" / "alerts.yml"
    document = yaml.safe_load(path.read_text())
    alerts = document["groups"][0]["rules"]
    before = copy.deepcopy(alerts)
    for rule in alerts:
        change(rule)
    changed = {rule["alert"] for rule, old in zip(alerts, before, strict=True) if rule != old}
    path.write_text(yaml.safe_dump(document))
    tested = promtool("test", "rules", "tests/rules_test.yml", cwd=folder)
    return set(re.findall(r"alertname: ?(\w+)", tested.stdout + tested.stderr)), changed


ALERTS = {str(rule["alert"]) for rule in rules() if "alert" in rule}


def test_every_alert_has_a_case_in_which_it_fires(tmp_path: Path) -> None:
    """With every comparison turned round, a case of every alert fails: none is there for show."""
    turned = {"== 1": "== 7", "== 0": "== 7", "> ": "< ", "< ": "> "}

    def change(rule: dict[str, str]) -> None:
        sign = next(sign for sign in turned if sign in rule["expr"])
        rule["expr"] = rule["expr"].replace(sign, turned[sign])

    assert alerts_noticed(tmp_path, change) == (ALERTS, ALERTS)


def test_every_alert_has_a_case_in_which_its_threshold_keeps_it_silent(tmp_path: Path) -> None:
    """With every threshold lowered until any value passes, a case of every alert fails: a firing that nothing calls for is noticed."""

    def change(rule: dict[str, str]) -> None:
        expression = re.sub(r"absent\([^)]*\) == 1", "vector(1)", rule["expr"])
        expression = re.sub(r"== 0", ">= 0", expression)
        expression = re.sub(r"> [0-9.]+", "> -1", expression)
        rule["expr"] = re.sub(r"< [0-9.]+", "< 1000", expression)

    assert alerts_noticed(tmp_path, change) == (ALERTS, ALERTS)


def test_every_alert_that_waits_has_a_case_in_which_it_still_waits(tmp_path: Path) -> None:
    """Without its `for` a case of every alert that has one fails."""
    noticed, waiting = alerts_noticed(tmp_path, lambda rule: rule.update({"for": "0s"} if "for" in rule else {}))
    assert waiting == {str(rule["alert"]) for rule in rules() if "alert" in rule and "for" in rule}
    assert noticed == waiting


def test_rules_read_what_the_services_export() -> None:
    """Every series of ours that a rule reads is exported by the code or made by another rule."""
    known = metrics_table.names() | recorded()
    for rule in rules():
        assert own_names(str(rule["expr"])) <= known, rule.get("alert") or rule.get("record")


def test_every_alert_says_what_to_do() -> None:
    """Severity, a summary, an action, and a paragraph in the troubleshooting page."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "action"}
            assert f"`{rule['alert']}`" in page, f"docs/troubleshooting.md does not explain {rule['alert']}"


def test_all_configurations_scrape_the_same_jobs() -> None:
    """Compose, bare metal and Kubernetes give series the same job names, which rules and dashboards rely on."""
    jobs = {path: [job["job_name"] for job in yaml.safe_load(path.read_text())["scrape_configs"]] for path in [*CONFIGS, KUBERNETES]}
    for found in jobs.values():
        assert sorted(found) == ["cpu-expert", "gateway", "gpu-worker", "node", "prometheus"]


def test_the_configuration_for_kubernetes_is_valid(tmp_path: Path) -> None:
    """Debian's promtool is built without Kubernetes' service discovery: that part is compared here, the rest is checked by promtool."""
    config = yaml.safe_load(KUBERNETES.read_text())
    for job in config["scrape_configs"]:
        if "kubernetes_sd_configs" in job:
            assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"own_namespace": True}}]
            job["static_configs"] = [{"targets": ["pod:1"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    checked = promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    compose = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["global"] == compose["global"]
    assert config["rule_files"] == compose["rule_files"]


def test_alerts_name_settings_that_exist() -> None:
    """Advice that names a setting names one that there is."""
    settings = (ROOT / "docs" / "settings.md").read_text()
    for name in re.findall(r"GLM53_[A-Z0-9_]+", "".join(path.read_text() for path in RULES)):
        assert f"`{name}`" in settings, name


def test_the_metrics_reference_is_up_to_date() -> None:
    """docs/metrics.md equals what the registries say."""
    assert metrics_table.OUT.read_text() == metrics_table.table()
