"""What holds for chat holds for every URL that answers: the same limits, the same refusals, each in its own API's words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.stack import HELLO, MODEL, Stack


@dataclass(frozen=True)
class Url:
    """An API that generates.

    Attributes:
        body: the least that it takes.
        prompt: its field for what is asked.
        limit: its field for how long the answer may be; a path into the body.
        options: where sampling fields stand, empty for the body itself.
    """

    path: str
    body: dict[str, Any]
    prompt: str
    limit: str
    options: str = ""

    def with_option(self, name: str, value: Any) -> dict[str, Any]:
        """The body with a sampling field."""
        return self.body | ({self.options: {name: value}} if self.options else {name: value})

    @property
    def blamed(self) -> str:
        """What an error about the limit blames."""
        return self.options or self.limit


URLS = [
    Url("/v1/chat/completions", {"model": MODEL, "messages": HELLO}, "messages", "max_completion_tokens"),
    Url("/v1/completions", {"model": MODEL, "prompt": "Hello"}, "prompt", "max_tokens"),
    Url("/v1/responses", {"model": MODEL, "input": "Hello"}, "input", "max_output_tokens"),
    Url("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 50}, "messages", "max_tokens"),
    Url("/generate", {"text": "Hello"}, "text", "max_new_tokens", "sampling_params"),
]
EVERY = pytest.mark.parametrize("url", URLS, ids=lambda url: url.path)


def refused(stack: Stack, url: Url, body: dict[str, Any]) -> dict[str, Any]:
    response = stack.http.post(url.path, json=body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"].startswith("application/json")
    found = response.json()
    assert "detail" not in found
    assert (found["type"] == "error") if url.path == "/v1/messages" else list(found) == ["error"]
    assert found["error"]["type"] == "invalid_request_error"
    assert not stack.worker.requests
    return dict(found["error"])


@EVERY
@pytest.mark.parametrize("value", [None, [], 5, True, {}, ...], ids=str)
def test_nothing_to_answer_is_named(stack: Stack, url: Url, value: Any) -> None:
    """No input, in every way: absent, null, empty, of another type."""
    body = {name: given for name, given in (url.body | {url.prompt: value}).items() if given is not ...}
    error = refused(stack, url, body)
    # /generate has two fields for its prompt; without any the body is at fault.
    assert error["param"] in ((url.prompt, "body") if url.path == "/generate" else (url.prompt,))


@EVERY
def test_a_limit_beyond_the_context_is_cut(stack: Stack, url: Url) -> None:
    """An absurd limit is what fits; the answer then ends with its API's word for the length."""
    stack.play(Say("a"), Finish(pb.FINISH_REASON_LENGTH))
    response = stack.http.post(url.path, json=url.with_option(url.limit, 99_999_999))
    assert response.status_code == 200
    request = stack.worker.requests[-1]
    assert request.sampling.max_tokens == 1000 - len(request.prompt_token_ids)
    assert any(word in response.text for word in ('"length"', '"max_tokens"', '"max_output_tokens"'))


@EVERY
@pytest.mark.parametrize("value", [-1, True, 1e30, 1.5, "5", 10**30, [], {}], ids=str)
def test_limits_that_are_none_are_named(stack: Stack, url: Url, value: Any) -> None:
    """Negative, boolean, fractional and absurd ones, under the field's own name."""
    error = refused(stack, url, url.with_option(url.limit, value))
    assert error["param"] == url.blamed
    assert url.limit in error["message"]


@EVERY
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "NaN"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("frequency_penalty", 3),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", [-1]),
    ],
)
def test_ranges_are_the_same(stack: Stack, url: Url, name: str, value: Any) -> None:
    """A sampling field out of range is refused by its name, wherever it is taken."""
    error = refused(stack, url, url.with_option(name, value))
    assert error["param"] == (url.options or name)
    assert name in error["message"]


@EVERY
@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_without_room_is_refused_before_any_byte(stack: Stack, url: Url, streaming: bool) -> None:
    """400 with both numbers, as JSON also when a stream was asked for."""
    text = "7" * 5000
    body = url.body | {url.prompt: [{"role": "user", "content": text}] if url.prompt == "messages" else text, "stream": streaming}
    error = refused(stack, url, body)
    assert error["param"] == url.prompt
    assert "1000" in error["message"]
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


@EVERY
@pytest.mark.parametrize("body", [b'{"model":"m",}', b"[]", b'"x"', b"", b"null", b"\xff\xfe\x00", b"{" * 2000], ids=str)
def test_bodies_that_are_no_object(stack: Stack, url: Url, body: bytes) -> None:
    """Never 500, never a framework's shape."""
    response = stack.http.post(url.path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    found = response.json()
    assert "detail" not in found
    assert found["error"]["type"] == "invalid_request_error"
    assert found["error"]["message"].startswith("The body ")


def usage(path: str, text: str, *, streamed: bool) -> tuple[int, int]:
    """Prompt and completion tokens of an answer."""
    if not streamed:
        found = json.loads(text)
    else:
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        found = next(event for event in reversed(events) if event.get("usage") or event.get("meta_info") or event.get("response"))
        found = found.get("response", found)
        if path == "/v1/messages":
            start = next(event for event in events if event["type"] == "message_start")
            found = {"usage": start["message"]["usage"] | found["usage"]}
    counts = found.get("usage") or found["meta_info"]
    pairs = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
    first, second = next(pair for pair in pairs if pair[0] in counts)
    return counts[first] + counts.get("cache_read_input_tokens", 0), counts[second]


@EVERY
@pytest.mark.parametrize(
    ("text", "reason"),
    [("hm</think>So 🦊", pb.FINISH_REASON_STOP), ("hm</think>So", pb.FINISH_REASON_LENGTH), ("never closed", pb.FINISH_REASON_LENGTH)],
)
def test_a_stream_counts_as_a_whole_answer_does(stack: Stack, url: Url, text: str, reason: int) -> None:
    """Prompt and completion tokens, the token that ended the answer among them, are the same both ways."""
    stack.play(Say(text), Finish(reason, cached=2))
    whole = stack.http.post(url.path, json=url.body)
    extra = {"stream_options": {"include_usage": True}} if url.path in ("/v1/chat/completions", "/v1/completions") else {}
    streamed = stack.http.post(url.path, json=url.body | {"stream": True} | extra)
    assert (whole.status_code, streamed.status_code) == (200, 200)
    counted = usage(url.path, whole.text, streamed=False)
    assert counted == usage(url.path, streamed.text, streamed=True)
    assert counted[0] == len(stack.worker.requests[0].prompt_token_ids)
    assert counted[1] > 0
