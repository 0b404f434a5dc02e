"""What holds for chat holds for every URL that answers: the same limits, the same refusals, each in its own API's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from services.common.errors import EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.fake_worker import Fail, Finish, Say, Wait
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
    assert error["param"] == url.prompt


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


CALL_TEXT = "So <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call> done"
NO_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "reasoning_effort": "none"},
    "/v1/completions": {},
    "/v1/responses": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "reasoning": {"effort": "none"}},
    "/v1/messages": {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}},
    "/generate": {"sampling_params": {"skip_special_tokens": False}},
}


@EVERY
@pytest.mark.parametrize("per_event", [1, 3, 100])
def test_calls_that_nobody_asked_for_are_text(stack: Stack, url: Url, per_event: int) -> None:
    """With tool_choice none, or where there are no tools, a call is left as the model wrote it, streamed or whole."""
    stack.play(Say(CALL_TEXT, per_event), Finish())
    whole = stack.http.post(url.path, json=url.body | NO_TOOLS[url.path]).text
    streamed = stack.http.post(url.path, json=url.body | NO_TOOLS[url.path] | {"stream": True}).text
    for text in (whole, joined(url.path, streamed)):
        shown = json.dumps(CALL_TEXT, ensure_ascii=False)[1:-1]
        if url.path == "/v1/completions":
            # Special tokens are hidden there unless they are asked for, as in vLLM.
            assert "So " in text
            assert " done" in text
        else:
            assert shown in text
        assert '"tool_use"' not in text
        assert '"function_call"' not in text
        assert '"tool_calls":[{' not in text


def joined(path: str, streamed: str) -> str:
    """The text that a stream's events make together, as JSON would write it."""
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    if path == "/generate":
        return json.dumps(events[-1]["text"], ensure_ascii=False)
    pieces = []
    for event in events:
        if "choices" in event:
            pieces += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]]
        elif event.get("type") == "response.output_text.delta":
            pieces.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            pieces.append(event["delta"].get("text", ""))
    return json.dumps("".join(pieces), ensure_ascii=False)


@EVERY
def test_a_silent_stream_is_kept_alive_on_every_url(stack: Stack, url: Url) -> None:
    """Comments come while the model says nothing, also before its first token, and the answer is whole all the same."""
    stack.play(Wait(0.8), Say("a"), Wait(0.8), Say("b"), Finish())
    text = stack.http.post(url.path, json=url.body | {"stream": True}).text
    lines = text.splitlines()
    comments = [index for index, line in enumerate(lines) if line.startswith(":")]
    first = next(index for index, line in enumerate(lines) if '"a"' in line)
    assert any(index < first for index in comments)
    assert any(index > first for index in comments)
    assert '"b"' in text or '"ab"' in text


@EVERY
def test_what_breaks_in_mid_stream_ends_the_stream_on_every_url(stack: Stack, url: Url) -> None:
    """An error event in the API's own form is the last thing that is said."""
    stack.play(Say("a"), Fail(EngineFailed("broken")))
    response = stack.http.post(url.path, json=url.body | {"stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    last = json.loads(events[-2] if events[-1] == "[DONE]" else events[-1])
    assert "broken" in json.dumps(last.get("error") or last.get("response", {}).get("error") or last.get("message"))
    assert (events[-1] == "[DONE]") == (url.path in ("/v1/chat/completions", "/v1/completions", "/generate"))


WHOLE = {
    "/v1/chat/completions": (
        "max_tokens",
        "n",
        "seed",
        "top_k",
        "priority",
        "min_tokens",
        "max_completion_tokens",
        "thinking_token_budget",
    ),
    "/v1/completions": ("max_tokens", "n", "seed", "top_k", "logprobs", "min_tokens", "truncate_prompt_tokens"),
    "/v1/responses": ("max_output_tokens", "seed", "top_k"),
    "/v1/messages": ("max_tokens", "seed", "top_k"),
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in WHOLE.items() for name in names])
def test_a_whole_number_may_be_written_as_a_float(stack: Stack, path: str, name: str) -> None:
    """JSON has one kind of number, and some languages write every one of them with a point. Halves, texts and booleans stay mistakes."""
    body = next(url.body for url in URLS if url.path == path)
    assert stack.http.post(path, json=body | {name: 2.0}).status_code == 200
    assert stack.worker.requests
    for value, shown in ((2.5, "2.5"), ("2", "'2'"), (True, "true")):
        stack.worker.requests.clear()
        error = refused(stack, next(url for url in URLS if url.path == path), body | {name: value})
        assert (error["param"], error["message"]) == (name, f"{name} must be an integer (got {shown}).")


def test_the_sampling_parameters_of_generate_are_whole_too(stack: Stack) -> None:
    """Also those that stand inside sampling_params; null says nothing."""
    for name in ("max_new_tokens", "min_new_tokens", "sampling_seed", "top_k", "n"):
        assert stack.http.post("/generate", json={"text": "a", "sampling_params": {name: 2.0}}).status_code == 200
    assert stack.http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": None}}).status_code == 200
    assert stack.sampling.max_tokens == 128


OTHER_NAMES = [
    ("/v1/chat/completions", "max_output_tokens", 5, "max_completion_tokens"),
    ("/v1/chat/completions", "stop_sequences", ["x"], "stop"),
    ("/v1/chat/completions", "system", "Be brief.", "a message of the role system"),
    ("/v1/chat/completions", "previous_response_id", "resp_1", "/v1/responses"),
    ("/v1/completions", "max_completion_tokens", 5, "max_tokens"),
    ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}], "/v1/chat/completions"),
    ("/v1/completions", "top_logprobs", 3, "logprobs"),
    ("/v1/responses", "max_tokens", 5, "max_output_tokens"),
    ("/v1/responses", "messages", HELLO, "input"),
    ("/v1/responses", "response_format", {"type": "json_object"}, "text.format"),
    ("/v1/messages", "max_completion_tokens", 5, "max_tokens"),
    ("/v1/messages", "response_format", {"type": "json_object"}, "output_config.format"),
    ("/v1/messages", "parallel_tool_calls", False, "tool_choice.disable_parallel_tool_use"),
    ("/generate", "max_tokens", 5, "sampling_params.max_new_tokens"),
    ("/generate", "seed", 5, "sampling_params.sampling_seed"),
]


@pytest.mark.parametrize(("path", "name", "value", "use"), OTHER_NAMES)
def test_names_of_the_other_urls_are_refused_with_the_name_to_use(stack: Stack, path: str, name: str, value: Any, use: str) -> None:
    """A limit that nobody heeds is an answer without an end: what a URL has under another name is no unknown field."""
    url = next(url for url in URLS if url.path == path)
    error = refused(stack, url, url.body | {name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"] == f"{name} is not a field of this URL; use {use}."
    assert stack.http.post(path, json=url.body | {name: None}).status_code == 200


@EVERY
def test_fields_that_ask_for_nothing_may_stand_on_any_url(stack: Stack, url: Url) -> None:
    """Clients that fill in every field they know are answered."""
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "top_logprobs": 0,
        "stop_sequences": [],
        "system": "",
    }
    if url.path == "/v1/chat/completions":
        del nothing["top_logprobs"]
    elif url.path == "/v1/messages":
        del nothing["tool_choice"]
    assert stack.http.post(url.path, json=url.body | nothing).status_code == 200


@EVERY
@pytest.mark.parametrize("slashed", ["{}/", "/{}", "//{}//", "{}///"])
def test_slashes_too_many_are_none(stack: Stack, url: Url, slashed: str) -> None:
    """A base URL that ends with a slash, and a path that begins or ends with one: clients do not follow redirects with a body."""
    response = stack.http.post(f"{stack.url}{slashed.format(url.path)}", json=url.body)
    assert response.status_code == 200, response.text
    assert stack.worker.requests


def test_slashes_do_not_open_doors(stack: Stack) -> None:
    """A path is looked up as it is meant, in every check; what does not exist is still said to be missing."""
    assert stack.http.get(f"{stack.url}//v1//models/").json()["object"] == "list"
    missing = stack.http.get(f"{stack.url}//nothing//here/")
    assert (missing.status_code, missing.json()["error"]["message"]) == (
        404,
        "There is no GET /nothing/here; GET /openapi.json lists what there is.",
    )


@pytest.mark.parametrize("wrong", [lambda path: path.replace("/v1", "", 1), lambda path: f"/v1{path}", lambda path: path[:-1]])
def test_a_missing_url_names_the_one_that_was_meant(stack: Stack, wrong: Callable[[str], str]) -> None:
    """A base URL with a /v1 too few or too many, and a slip of the finger."""
    for meant in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        response = stack.http.post(wrong(meant), json={})
        message = f"There is no POST {wrong(meant)}: did you mean {meant}?"
        assert (response.status_code, response.json()["error"]["message"]) == (404, message)


def test_a_long_missing_url_is_looked_at_in_part(stack: Stack) -> None:
    """Neither the search nor the message grows with it."""
    response = stack.http.get("/v1/models" + "x" * 10_000)
    assert response.status_code == 404
    assert len(response.json()["error"]["message"]) < 300
