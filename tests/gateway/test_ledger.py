"""Usage: a line for every request that used tokens, wherever it ended, and none that costs a request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter

from services.common.errors import ConfigError
from services.gateway.access import ledger as ledgers
from services.gateway.access.admission import AccessPolicy
from services.gateway.access.keys import ANYONE
from services.gateway.access.ledger import UsageLedger
from services.gateway.access.limits import LocalCounters
from tests.gateway.access import ask, write_keys
from tests.gateway.events import chat_body
from tests.gateway.fake_worker import Finish, Forever, Say, Script
from tests.gateway.stack import MODEL, Stack, until
from tests.gateway.test_streams import raw_post, read_until


@pytest.fixture
def billed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stack, dict[str, str], Path]]:
    """A gateway that writes usage every few milliseconds."""
    monkeypatch.setattr(ledgers, "_INTERVAL_S", 0.02)
    keys = write_keys(tmp_path / "keys.json", ada={}, bob={})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"), usage_file=str(tmp_path / "usage.jsonl"))
    yield stack, keys, tmp_path / "usage.jsonl"
    stack.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_request_has_its_line(billed: tuple[Stack, dict[str, str], Path]) -> None:
    """Whole, streamed, several choices, other APIs: who, where, how much. Refused ones have none, and words are never there."""
    stack, keys, path = billed
    stack.worker.script = Script((Say("hm</think>secret answer"), Finish(cached=2)))
    ask(stack, keys["ada"])
    ask(stack, keys["bob"], stream=True)
    ask(stack, keys["ada"], n=2)
    stack.http.post("/v1/messages", json={**chat_body(), "max_tokens": 9}, headers={"x-api-key": keys["bob"]})
    ask(stack, keys["ada"], temperature=-1)
    ask(stack, "wrong")
    until(lambda: len(lines(path)) == 4, "four lines")
    found = lines(path)
    assert [(line["key_id"], line["path"], line["generations"]) for line in found] == [
        ("ada", "/v1/chat/completions", 1),
        ("bob", "/v1/chat/completions", 1),
        ("ada", "/v1/chat/completions", 2),
        ("bob", "/v1/messages", 1),
    ]
    for line in found:
        assert line["tokens"] == line["prompt_tokens"] + line["completion_tokens"] > 0
        assert line["cached_tokens"] == 2 * line["generations"]
    assert len({line["request_id"] for line in found}) == 4
    assert "secret" not in path.read_text()


def test_a_request_that_was_cut_off_is_there_with_what_it_took(billed: tuple[Stack, dict[str, str], Path]) -> None:
    """Its tokens count, prompt and answer so far; no generation ended."""
    stack, keys, path = billed
    stack.worker.script = Script((Say("</think>a b c"), Forever()))
    with raw_post(stack, chat_body(stream=True), more_headers=f"Authorization: Bearer {keys['ada']}\r\n") as connection:
        read_until(connection, b'"content":"a')
    until(lambda: lines(path), "the line")
    (line,) = lines(path)
    assert (line["key_id"], line["generations"], line["completion_tokens"]) == ("ada", 0, 0)
    assert line["tokens"] > len(stack.worker.requests[-1].prompt_token_ids)


def test_the_file_may_be_moved_away(billed: tuple[Stack, dict[str, str], Path]) -> None:
    """As logrotate does it: the next line makes a new file."""
    stack, keys, path = billed
    ask(stack, keys["ada"])
    until(lambda: lines(path), "the first line")
    path.rename(path.with_suffix(".1"))
    ask(stack, keys["bob"])
    until(lambda: lines(path), "the second line")
    assert [line["key_id"] for line in lines(path.with_suffix(".1")) + lines(path)] == ["ada", "bob"]


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    """A gateway that stops leaves no line behind."""
    stack = Stack(usage_file=str(tmp_path / "usage.jsonl"))
    assert stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 200
    stack.close()
    assert [line["key_id"] for line in lines(tmp_path / "usage.jsonl")] == [ANYONE.id]


async def test_a_full_disk_costs_nothing_but_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait and are written later, in order and once; beyond the bound the oldest go and are counted."""
    monkeypatch.setattr(ledgers, "_MAX_WAITING", 3)
    lost = Counter("lost", "Lost.", registry=None)
    path = tmp_path / "there" / "usage.jsonl"
    path.parent.mkdir()
    ledger = UsageLedger(path, lost)
    path.unlink()
    path.mkdir()
    policy = AccessPolicy(LocalCounters(), None)
    for number in range(5):
        admission = policy.enter(ANYONE, f"r{number}")
        admission.used(7)
        ledger.note(admission, "/v1/completions")
        await ledger.flush()
    assert lost._value.get() == 2
    path.rmdir()
    for _ in range(2):
        await ledger.flush()
    assert [line["request_id"] for line in lines(path)] == ["r2", "r3", "r4"]


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    """Better than to find out when the bill is due."""
    with pytest.raises(ConfigError, match="GLM53_USAGE_FILE"):
        UsageLedger(tmp_path / "nowhere" / "usage.jsonl", Counter("lost", "Lost.", registry=None))


def start(path: Path, keys: Path | None = None) -> UsageLedger:
    return UsageLedger(path, Counter("lost", "Lost.", registry=None), keys)


OTHERS = ["diary", "diary\n", "{}\n", "[1]\n", '{"ts": 1, "tokens": 2}\n', '{"keys": []}\n', "[" * 50_000 + "\n", "\0" * 200_000]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_lines_are_never_appended_to_another_file(tmp_path: Path, other: str) -> None:
    """Whatever lies there is told with its setting, and stays as it is."""
    path = tmp_path / "usage.jsonl"
    path.write_text(other)
    with pytest.raises(
        ConfigError, match=f"GLM53_USAGE_FILE={path} .* it has {len(other)} bytes that are no usage lines of ours"
    ) as caught:
        start(path)
    assert caught.value.param == "GLM53_USAGE_FILE"
    assert path.read_text() == other


def test_a_start_goes_on_with_the_lines_of_an_earlier_one(billed: tuple[Stack, dict[str, str], Path], tmp_path: Path) -> None:
    """Also when the last one was cut off with its gateway; an empty file, a pipe and a device hold nothing that could be spoiled."""
    stack, keys, path = billed
    ask(stack, keys["ada"])
    until(lambda: lines(path), "the line")
    whole = path.read_text()
    again = tmp_path / "again.jsonl"
    for text in ("", whole, whole * 500, whole + whole[:20], whole[:20], whole[:3], whole + "\0" * 500):
        again.write_text(text)
        start(again)
        assert again.read_text() == text
        start(again)._append([whole.rstrip()])
        rest = "\n" if text and not text.endswith("\n") else ""
        assert again.read_text() == text + rest + whole
        start(again)  # with what was cut off before the last line
    start(Path(os.devnull))
    with pytest.raises(ConfigError, match="it is a folder"):
        start(tmp_path)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("way", ["same", "detour", "symlink", "hard link"])
def test_usage_and_keys_in_one_file_are_refused(tmp_path: Path, way: str, there: bool) -> None:
    """By whatever name: a line in the key file would end all keys."""
    keys, usage = tmp_path / "keys.json", tmp_path / "usage.jsonl"
    if there:
        write_keys(keys, ada={})
    if way == "symlink":
        usage.symlink_to(keys)
    elif way == "hard link":
        if not there:
            return
        usage.hardlink_to(keys)
    else:
        usage = keys if way == "same" else tmp_path / ".." / tmp_path.name / "keys.json"
    before = keys.read_bytes() if there else None
    with pytest.raises(ConfigError, match=f"GLM53_USAGE_FILE={usage} is the file of GLM53_API_KEYS_FILE") as caught:
        Stack(api_keys_file=str(keys), usage_file=str(usage))
    assert caught.value.param == "GLM53_USAGE_FILE"
    assert (keys.read_bytes() if keys.exists() else None) == before


def test_a_link_to_a_file_that_was_moved_away_leads_to_the_next_one(tmp_path: Path) -> None:
    """A program that rotates the file may be between its two steps."""
    (tmp_path / "log").mkdir()
    link = tmp_path / "usage.jsonl"
    link.symlink_to(tmp_path / "log" / "usage.jsonl")
    start(link)
    assert (tmp_path / "log" / "usage.jsonl").read_text() == ""


def test_what_the_log_goes_to_is_meant(tmp_path: Path) -> None:
    """/dev/stdout of a gateway whose output goes to a file that has lines already."""
    log = tmp_path / "log"
    log.write_text("a line of the log\n")
    code = (
        "from pathlib import Path; from prometheus_client import Counter; from services.gateway.access.ledger import UsageLedger\n"
        "UsageLedger(Path('/dev/stdout'), Counter('lost', 'Lost.'))._append(['{}'])"
    )
    with log.open("a") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)
    assert log.read_text() == "a line of the log\n{}\n"
