"""Texts and lists far beyond the context: refused before anything slow, and what is slow is done beside the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ContextLengthExceeded
from services.gateway import beside, body, tokenizer
from services.gateway.tokenizer import PromptTokenizer, text_size
from tests.gateway.hostile import CHAT, connected, post
from tests.gateway.language import TOKENIZER, TOKENIZER_JSON
from tests.gateway.stack import MODEL, Stack, until
from tests.gateway.test_validation import check_error

CONTEXT = 1000
MOST = CONTEXT * TOKENIZER.longest_bytes
LONG = "x" * (MOST + 1)
USER = [{"role": "user", "content": LONG}]
TOOL = [{"type": "function", "function": {"name": "f", "description": LONG}}]
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": USER}, "messages"),
    "chat in parts": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 1000}] * (MOST // 1000 + 1)}]},
        "messages",
    ),
    "tools": ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "tools": TOOL}, "tools"),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": LONG}, "prompt"),
    "one of several": ("/v1/completions", {"model": MODEL, "prompt": ["a", LONG]}, "prompt"),
    "generate": ("/generate", {"text": LONG}, "text"),
    "tokenize": ("/tokenize", {"prompt": LONG}, "prompt"),
    "tokenize messages": ("/tokenize", {"messages": USER}, "messages"),
    "messages": ("/v1/messages", {"model": MODEL, "messages": USER, "max_tokens": 5}, "messages"),
    "count tokens": ("/v1/messages/count_tokens", {"model": MODEL, "messages": USER}, "messages"),
    "responses": ("/v1/responses", {"model": MODEL, "input": LONG}, "input"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(stack: Stack, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """400 context_length_exceeded with both sizes, at every URL that takes text; the tokenizer is not asked."""
    path, fields, param = TOO_LONG[name]
    assert stack.post().status_code == 200  # the watch has the context
    monkeypatch.setattr(tokenizer, "_encode", lambda *_, **__: pytest.fail("encoded"))
    response = stack.http.post(path, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert f"{MOST} bytes" in error["message"]
    assert "1000 tokens" in error["message"]
    assert not [request for request in stack.worker.requests if len(request.prompt_token_ids) > 100]


def test_a_text_of_the_longest_tokens_is_taken(stack: Stack) -> None:
    """The bound refuses nothing that fits: a context full of the vocabulary's longest token."""
    longest = max(
        range(TOKENIZER.vocab_size), key=lambda number: len(TOKENIZER.piece(number)) if number not in TOKENIZER.special_ids else 0
    )
    text = TOKENIZER.piece(longest).decode() * 10
    assert stack.post("/v1/completions", prompt=text * 10).status_code == 200
    tokens = stack.http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] <= 10


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_no_token_is_longer_than_the_longest(ids: list[int]) -> None:
    """The text of n tokens has at most n times the bytes of the longest one."""
    assert len(b"".join(map(TOKENIZER.piece, ids))) <= len(ids) * TOKENIZER.longest_bytes


def test_a_normaliser_that_shortens_texts_widens_the_bound() -> None:
    """A text may lose bytes before it is cut into tokens: then more of it can fit."""
    document = json.loads(TOKENIZER_JSON) | {"normalizer": {"type": "NFC"}}
    assert PromptTokenizer(json.dumps(document).encode()).longest_bytes == 3 * TOKENIZER.longest_bytes


def test_without_a_known_context_nothing_is_refused() -> None:
    """The bound exists from the worker's first answer on."""
    fresh = PromptTokenizer(TOKENIZER_JSON)
    fresh.check_size(10**12, "prompt")
    fresh.serve(10)
    with pytest.raises(ContextLengthExceeded):
        fresh.check_size(10 * fresh.longest_bytes + 1, "prompt")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/generate"])
def test_a_text_of_far_too_many_tokens_is_refused_by_its_beginning(stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """400 context_length_exceeded with both numbers; most of it is never encoded. Whoever asks for the number of its tokens gets it."""
    assert stack.post().status_code == 200  # the watch has the context
    text = "0123456789" * (12 * CONTEXT // 10)
    monkeypatch.setattr(tokenizer, "_PIECE_CHARS", 100)
    monkeypatch.setattr(tokenizer, "_encode", lambda *_, **__: pytest.fail("encoded"))
    user = [{"role": "user", "content": text}]
    fields: dict[str, dict[str, Any]] = {
        CHAT: {"messages": user},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": user, "max_tokens": 5},
        "/generate": {"text": text},
    }
    response = stack.http.post(path, json={"model": MODEL, **fields[path]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == next(name for name in fields[path] if name != "max_tokens")
    assert "maximum context length is 1000 tokens" in error["message"]
    assert 2000 < int(error["message"].split("alone has ")[1].split(".")[0]) < 2200
    monkeypatch.undo()
    counted = stack.http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": user}).json()["input_tokens"]
    listed = stack.http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["count"]
    assert min(counted, listed) > 2 * CONTEXT


@given(st.text(st.sampled_from("<|>a0 é🦊"), max_size=80), st.integers(1, 9))
def test_pieces_of_a_text_have_few_tokens_more_than_the_whole(text: str, size: int) -> None:
    """Even in pieces of a few letters not twice as many: what has twice the context's tokens in pieces does not fit as a whole."""
    pieces = [text[start : start + 8 * size] for start in range(0, len(text), 8 * size)]
    whole = len(TOKENIZER.encode_raw(text, add_special_tokens=False))
    assert sum(len(TOKENIZER.encode_raw(piece, add_special_tokens=False)) for piece in pieces) <= 2 * whole + 8


def test_a_truncated_prompt_may_be_longer(stack: Stack) -> None:
    """`truncate_prompt_tokens` keeps the end: the beginning is not even encoded."""
    assert stack.post("/v1/completions", prompt=LONG * 3 + " end", truncate_prompt_tokens=7).status_code == 200
    ids = list(stack.worker.requests[-1].prompt_token_ids)
    assert ids == TOKENIZER.encode_raw("x" * 1000 + " end", add_special_tokens=False)[-7:]


@given(st.text(st.sampled_from("<|>a/ é"), max_size=60), st.integers(1, 7))
def test_marking_in_pieces_is_marking(text: str, size: int) -> None:
    """Long texts are marked piece by piece, with the same result."""
    whole = TOKENIZER.mark(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_PIECE_CHARS", size)
        assert TOKENIZER.mark(text) == whole
        assert TOKENIZER.unmark(whole) == text


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)
    )
)
def test_the_size_of_a_value_is_no_more_than_its_bytes(value: Any) -> None:
    """So that it may stand for them where a bound is checked."""
    assert text_size(value) <= len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@pytest.fixture
def busy_threads() -> Iterator[threading.Event]:
    """All threads for texts are busy until the event is set."""
    done = threading.Event()
    waiting = [beside._THREADS.submit(done.wait, 60) for _ in range(beside._THREADS._max_workers)]
    yield done
    done.set()
    for future in waiting:
        future.result()


def test_a_client_that_leaves_while_its_text_waits_costs_nothing(
    stack: Stack, busy_threads: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn never comes; small requests go on beside the full threads."""
    encoded: list[int] = []
    encode = tokenizer._encode

    def counted(which: Any, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(which, text, **options)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    large = {"model": MODEL, "messages": [{"role": "user", "content": "y" * 6000}]}
    for _ in range(5):
        with connected(stack) as connection:
            connection.sendall(post(large))
            until(lambda: stack.services.traffic.in_flight == 1, "it waits")
            assert stack.post().status_code == 200
        until(lambda: stack.services.traffic.in_flight == 0, "it is over")
    busy_threads.set()
    assert stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "z" * 4001}).status_code in (200, 400)
    assert 4001 in encoded
    assert max(encoded) < 6000


def test_long_lists_are_refused_with_both_numbers(stack: Stack) -> None:
    """/tokenize and /detokenize say what they take; what is at the bound they do."""
    most = 65_536
    cases = [
        ("/tokenize", {"prompt": ["a"] * 5000}, "prompt", ("5000", "4096")),
        ("/detokenize", {"tokens": [5] * 700_000}, "tokens", ("700000", str(most))),
        ("/detokenize", {"tokens": [[5]] * 100_000}, "tokens", ("100000", "4096")),
        ("/detokenize", {"tokens": [[5] * 50_000] * 2}, "tokens", ("100000", str(most))),
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 5000}, "prompt", ("5000", "1024")),
    ]
    for path, fields, param, numbers in cases:
        error = check_error(stack.http.post(path, json=fields), param)
        assert all(number in error["message"] for number in numbers), error
    ids = TOKENIZER.encode_raw("hello ", add_special_tokens=False)
    text = TOKENIZER.decode(ids)
    many = ids * (most // len(ids))
    assert stack.http.post("/detokenize", json={"tokens": many}).json()["text"] == text * (most // len(ids))
    assert stack.http.post("/detokenize", json={"tokens": [ids] * 4096}).json()["text"] == [text] * 4096
    found = stack.http.post("/tokenize", json={"prompt": ["hello "] * 1000, "add_special_tokens": False}).json()
    assert found["tokens"] == [ids] * 1000


@pytest.mark.parametrize("part", [b"1,", b"[],", b"{},", b'{"a":1},'])
def test_a_body_of_too_many_parts_is_refused(stack: Stack, part: bytes) -> None:
    """So many of anything would hold everybody up while they are read."""
    data = b'{"model": "tiny", "x": [' + part * 900_000 + b"1]}"
    assert "800000" in check_error(stack.http.post("/v1/chat/completions", content=data), None, 413)["message"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES, st.booleans())
def test_long_bodies_are_read_as_short_ones_are(value: Any, ascii_only: bool) -> None:
    """Another parser, the same value."""
    data = json.dumps({"value": value}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert body._value_of(data) == body._value_of(data + b" " * beside.SMALL_BYTES)


@pytest.mark.parametrize("padding", [0, 70_000])
@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b'"a\\ud83d b"', "a\ufffd b"),
        (b'"\\ud83e\\udd8a"', "\U0001f98a"),
        (b'"\xed\xa0\xbd"', "\ufffd"),
        (b'"\xed\xa0\xbe\xed\xb6\x8a"', "\U0001f98a"),
        (b'"\\udd8a\\ud83e"', "\ufffd\ufffd"),
    ],
)
def test_halves_of_pairs_are_replaced_however_they_come(raw: bytes, read: str, padding: int) -> None:
    """Escaped or as bytes, in short bodies and long ones; whole pairs are what they mean."""
    assert body._value_of(b'{"\\ud800": ' + raw + b"}" + b" " * padding) == {"\ufffd": read}
