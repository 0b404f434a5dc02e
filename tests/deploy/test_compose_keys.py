"""Keys and passwords of the compose stack, made and asked for with the commands of deploy/compose/README.md."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.engine import ROOT, Engine, until
from tests.deploy.stack import Stack, get, settings

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]


def readme_commands() -> list[str]:
    """The block of commands that makes keys and passwords."""
    text = (ROOT / "deploy/compose/README.md").read_text().partition("**Keys and passwords.**")[2].partition("For other machines")[0]
    return [line.strip().partition("     #")[0].strip() for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]


def with_key(url: str, key: str) -> int:
    """The status of an answer to a request with a key."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_keys_are_made_and_asked_for_as_the_readme_says(engine: Engine, built: dict[str, str], tmp_path: Path) -> None:
    """Its commands make the files; with them the gateway refuses who has no key and knows who has one, also when the file changes."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    folder = tmp_path / "deploy" / "compose"
    override = ROOT / "tests/deploy/podman4.yaml"
    stack = Stack(engine, {**settings(), "COMPOSE_FILE": f"compose.yaml:{override}"}, folder=folder)
    install, build, create, password, chmod, revoke = readme_commands()
    assert build == "docker compose --profile tools build cli"  # built already
    for command in (install, password):
        subprocess.run(["bash", "-ec", command], cwd=folder, check=True, capture_output=True)

    def cli(command: str) -> str:
        words = shlex.split(command.replace('"$(id -u):$(id -g)"', "0:0"))
        assert words[:4] == ["docker", "compose", "run", "--rm"]
        return stack.compose("run", "--rm", "--no-TTY", *words[4:])

    key = cli(create).strip().splitlines()[-1]
    subprocess.run(["bash", "-ec", chmod], cwd=folder, check=True, capture_output=True)
    stack.env["COMPOSE_FILE"] = f"compose.yaml:compose.secrets.yaml:{override}"
    try:
        stack.compose("up", "--detach", "--no-build", "--pull", "never", "gateway")
        until(lambda: get(f"{stack.api}/health/live")[0] == 200, "the gateway answers", 90, 0.3)
        assert get(f"{stack.api}/v1/models")[0] == 401
        assert with_key(f"{stack.api}/v1/models", key + "x") == 401
        assert with_key(f"{stack.api}/v1/models", key) in (200, 503)  # no worker runs here
        # While it runs: another key comes in, and the first one goes.
        second = cli(create.replace("--id me", "--id me-too")).strip().splitlines()[-1]
        until(lambda: with_key(f"{stack.api}/v1/models", second) != 401, "a new key is known", 10)
        cli(revoke)
        until(lambda: with_key(f"{stack.api}/v1/models", key) == 401, "a withdrawn key is refused", 10)
        assert with_key(f"{stack.api}/v1/models", second) in (200, 503)
    finally:
        stack.down()
