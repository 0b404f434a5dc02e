"""Tokens are delivered when they are made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.server import Server
from cli.main import main as glm53

pytestmark = pytest.mark.e2e

ATTEMPTS = 5


@pytest.mark.alone
def test_the_real_stack_delivers_evenly_at_every_prompt_length(
    stack: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`glm53 stream-rate` passes at 0, 512 and 8,192 prompt tokens, and says what it measured.

    Another process may take the machine away in mid-stream, which looks like a burst; that does not happen every time, a fault would.
    """
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    for asked, length in ((0, 1), (512, 512), (8192, 8192)):
        for left in reversed(range(ATTEMPTS)):
            code = glm53(["stream-rate", "--url", stack.url, "--tokens", "96", "--prompts", str(asked)])
            (line,) = capsys.readouterr().out.splitlines()
            assert int(line.split()[1]) == length
            if code == 0:
                break
            assert left, line


def test_a_server_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 78, not a traceback."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    assert glm53(["stream-rate", "--url", "http://127.0.0.1:1"]) == 78


def test_the_command_says_what_it_measured_and_nothing_else(stack: Server) -> None:
    """Its requests to the server are no news: the table stands alone."""
    command = [sys.executable, "-m", "cli.main", "stream-rate", "--url", stack.url, "--tokens", "16", "--prompts", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert len(ran.stdout.splitlines()) == 1
    assert ran.stderr == ""


def test_the_address_that_serve_prints_is_taken(stack: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With /v1 at its end, as clients want it."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    assert glm53(["stream-rate", "--url", f"{stack.url}/v1/", "--tokens", "16", "--prompts", "0"]) in (0, 1)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_refusal_is_told_in_the_servers_words(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stack: Server) -> None:
    """Such as that of a server which asks for keys; here that of an address which is none."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    assert glm53(["stream-rate", "--url", f"{stack.url}/elsewhere"]) == 78
    assert "answers 404: " in caplog.text
    assert "There is no GET /elsewhere/v1/models" in caplog.text
