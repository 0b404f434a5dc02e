"""/v1/chat/completions: answers, streamed and whole, are one and the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.events import Streamed, stream
from tests.gateway.fake_worker import Finish, Pieces, Say
from tests.gateway.language import IDS, encode
from tests.gateway.stack import HELLO, Stack
from tests.gateway.test_parser import CASES, Case, call

STRING = {"type": "string"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}}}},
}
LENGTH = Finish(pb.FINISH_REASON_LENGTH)
# Left out: a case whose tags are words, and the one kind of output that a stream cannot take back.
AGREEING = [case for case in CASES if "looks like tags" not in case.name and "never opened" not in case.name]


def both_ways(stack: Stack, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same request whole and streamed, checked to agree."""
    choice = stack.message(**fields)
    streamed = stream(stack, **fields)
    message = choice["message"]
    assert streamed.done
    assert streamed.error is None
    assert streamed.text("content") == (message["content"] or "")
    assert streamed.text("reasoning_content") == (message["reasoning_content"] or "")
    plain = [{**entry, "id": ""} for entry in message.get("tool_calls", [])]
    assert [{**entry, "id": ""} for entry in streamed.tool_calls] == plain
    assert streamed.finish_reasons == [choice["finish_reason"]]
    assert [delta["role"] for delta in streamed.deltas if "role" in delta] == ["assistant"]
    assert streamed.deltas[0]["role"] == "assistant"
    return choice, streamed


@pytest.mark.parametrize("per_event", [1, 3, 1000])
@pytest.mark.parametrize("case", AGREEING, ids=lambda case: case.name)
def test_streaming_and_whole_answers_agree(stack: Stack, case: Case, per_event: int) -> None:
    """Every output of the parser's tests, over HTTP, in events of one, three and all tokens."""
    thinking = {"type": "enabled" if case.tail.value == "reasoning" else "disabled"}
    stack.play(Say(case.text, per_event), Finish() if case.stopped else LENGTH)
    choice, streamed = both_ways(stack, tools=case.tools, thinking=thinking)
    assert (choice["message"]["content"] or "") == case.content
    assert (choice["message"]["reasoning_content"] or "") == case.reasoning
    assert choice["finish_reason"] == case.finish
    ids = [entry["id"] for entry in streamed.tool_calls]
    assert all(name.startswith("call_") for name in ids)
    assert len(set(ids)) == len(case.calls)
    whole = [entry["id"] for entry in choice["message"].get("tool_calls", [])]
    assert [(name[:5], len(name)) for name in whole] == [(name[:5], len(name)) for name in ids]


def test_the_shape_of_a_whole_answer(stack: Stack) -> None:
    """Every field that OpenAI's clients read."""
    stack.play(Say("hm</think>Hi"), Finish(cached=3))
    answer = stack.post().json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] == "fp_abcdef012345"
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len(stack.worker.requests[0].prompt_token_ids)
    completion = len(encode("hm</think>Hi")) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": len(encode("hm"))},
    }


def test_a_tool_call_has_null_content(stack: Stack) -> None:
    """An answer that only calls a tool has content null, and arguments are a JSON string."""
    stack.play(Say("</think>" + call("get_weather", city="Paris", days="3")), Finish())
    choice, streamed = both_ways(stack, tools=[WEATHER])
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "days": 3}
    parts = [part for delta in streamed.deltas for part in delta.get("tool_calls", [])]
    assert set(parts[0]) == {"index", "id", "type", "function"}
    assert parts[0]["function"] == {"name": "get_weather", "arguments": ""}
    for part in parts[1:]:
        assert set(part) == {"index", "function"}
        assert set(part["function"]) == {"arguments"}


@pytest.mark.parametrize("text", ["", "</think>", "</think>" + call("get_weather"), "hm</think>x"])
def test_the_role_comes_once_in_the_first_chunk(stack: Stack, text: str) -> None:
    """Also when the first event is a tool call or the end."""
    stack.play(Say(text), Finish())
    both_ways(stack, tools=[WEATHER])


def test_an_empty_answer_is_an_empty_string(stack: Stack) -> None:
    """A model that ends at once has said the empty string, not nothing."""
    stack.play(Finish())
    choice, _ = both_ways(stack)
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"


def test_the_length_limit_inside_reasoning(stack: Stack) -> None:
    """All of it is reasoning, content is null, finish is length."""
    stack.play(Say("let me see"), LENGTH)
    choice, _ = both_ways(stack, max_tokens=8)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "let me see"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("end", [0, IDS["<|endoftext|>"], IDS["<|user|>"]])
def test_a_model_that_skips_its_thinking_has_answered(stack: Stack, end: int) -> None:
    """A stop inside unclosed reasoning: the whole answer is content; a stream cannot take its reasoning back."""
    stack.play(Say("Paris"), Finish(stop_token_id=end))
    whole = stack.post().json()
    assert whole["choices"][0]["message"]["content"] == "Paris"
    assert whole["choices"][0]["message"]["reasoning_content"] is None
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert stream(stack).text("reasoning_content") == "Paris"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"stop": ["="]}, Finish(stop_string="=")),
        ({"stop_token_ids": encode("=")}, Finish(stop_token_id=encode("=")[-1])),
        ({"stop_token_ids": [IDS["</think>"]]}, Finish(stop_token_id=IDS["</think>"])),
    ],
    ids=["string", "token", "end of the thought"],
)
def test_what_stops_inside_reasoning_leaves_it_reasoning(stack: Stack, fields: dict[str, Any], end: Finish) -> None:
    """A thought that the client's own stop cut is no answer: content is null, streamed or not."""
    stack.play(Say("7 + 5"), end)
    choice, _ = both_ways(stack, **fields)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "7 + 5"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"reasoning_effort": "none"}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
    ],
)
def test_thinking_off_in_every_dialect(stack: Stack, fields: dict[str, Any]) -> None:
    """The prompt ends with an empty thought, the answer is content, nothing leaks."""
    stack.play(Say("81"), Finish())
    choice, _ = both_ways(stack, **fields)
    assert choice["message"] == {"role": "assistant", "content": "81", "reasoning_content": None, "refusal": None}
    assert list(stack.worker.requests[0].prompt_token_ids)[-3:] == [IDS["<|assistant|>"], IDS["<think>"], IDS["</think>"]]


@pytest.mark.parametrize("text", ["<think>9*9=81</think>81", "</think>81"])
def test_thinking_off_and_the_model_thinks_all_the_same(stack: Stack, text: str) -> None:
    """Reopened reasoning goes to its field, a stray </think> nowhere."""
    stack.play(Say(text), Finish())
    choice, _ = both_ways(stack, chat_template_kwargs={"enable_thinking": False})
    assert choice["message"]["content"] == "81"
    assert choice["message"]["reasoning_content"] == ("9*9=81" if "9" in text else None)


def test_thinking_off_and_the_model_closes_a_thought_that_it_never_opened(stack: Stack) -> None:
    """A whole answer keeps what came before </think> as reasoning; a stream has sent it, but never shows the tag."""
    stack.play(Say("9*9=81</think>81"), Finish())
    answer = stack.post(chat_template_kwargs={"enable_thinking": False}).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("81", "9*9=81")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(encode("9*9=81"))
    streamed = stream(stack, chat_template_kwargs={"enable_thinking": False})
    assert streamed.text("content") == "9*9=8181"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "Max"),
        ({"reasoning_effort": "low"}, "Low"),
        ({"reasoning_effort": "medium"}, "High"),
        ({"reasoning_effort": "high"}, "High"),
        ({"reasoning_effort": "xhigh"}, "Max"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "Low"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "Max"),
    ],
)
def test_the_effort_line(stack: Stack, fields: dict[str, Any], word: str) -> None:
    """reasoning_effort reaches the prompt in the template's words, thinking on."""
    stack.post(**fields)
    expected = encode(f"[gMASK]<sop><|system|>Reasoning Effort: {word}<|user|>Hello<|assistant|><think>")
    assert list(stack.worker.requests[0].prompt_token_ids) == expected


def test_include_reasoning_false_hides_it(stack: Stack) -> None:
    """The reasoning is made and counted, but not sent."""
    stack.play(Say("hm</think>Hi"), Finish())
    choice, streamed = both_ways(stack, include_reasoning=False)
    assert choice["message"]["reasoning_content"] is None
    assert choice["message"]["content"] == "Hi"
    assert not any("reasoning_content" in delta for delta in streamed.deltas)


def test_tool_choice_none_leaves_the_text_alone(stack: Stack) -> None:
    """No tools in the prompt, no parsing: what looks like a call stays text, finish is stop."""
    text = call("get_weather", city="Paris")
    stack.play(Say("</think>" + text), Finish())
    choice, _ = both_ways(stack, tools=[WEATHER], tool_choice="none")
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    stack.post()
    assert stack.worker.requests[0].prompt_token_ids == stack.worker.requests[-1].prompt_token_ids


def test_parallel_tool_calls_false_keeps_the_first(stack: Stack) -> None:
    """Only the first of two calls is shown, in both modes."""
    stack.play(Say("</think>" + call("get_weather", city="a") + call("get_weather", city="b"), 2), Finish())
    choice, _ = both_ways(stack, tools=[WEATHER], parallel_tool_calls=False)
    assert [json.loads(entry["function"]["arguments"]) for entry in choice["message"]["tool_calls"]] == [{"city": "a"}]


def test_a_tool_round_trip_renders_calls_and_results(stack: Stack) -> None:
    """Our own answer, sent back with its result, is rendered as the model wrote it."""
    stack.play(Say("why</think>" + call("get_weather", city="Paris", days="3")), Finish())
    message = stack.message(tools=[WEATHER])["message"]
    stack.post(
        tools=[WEATHER], messages=[*HELLO, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "17"}]
    )
    first, second = (list(request.prompt_token_ids) for request in stack.worker.requests)
    made = encode("why</think>" + call("get_weather", city="Paris", days="3"))
    result = encode("<|observation|><tool_response>17</tool_response><|assistant|><think>")
    assert second == first + made + result


def test_usage_comes_last_and_only_when_asked(stack: Stack) -> None:
    """With include_usage: null on every chunk, then one chunk with empty choices; without: nowhere."""
    stack.play(Say("hm</think>Hi"), Finish(cached=2))
    whole = stack.post().json()["usage"]
    streamed = stream(stack, stream_options={"include_usage": True})
    assert streamed.chunks[-1]["choices"] == []
    assert streamed.chunks[-1]["usage"] == whole
    assert streamed.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in streamed.chunks[:-1])
    for options in (None, {}, {"include_usage": False}):
        assert all("usage" not in chunk and chunk["choices"] for chunk in stream(stack, stream_options=options).chunks)


def test_continuous_usage(stack: Stack) -> None:
    """continuous_usage_stats puts the count so far on every chunk."""
    stack.play(Say("</think>a b c"), Finish())
    streamed = stream(stack, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_logprobs(stack: Stack) -> None:
    """Every token with text has an entry; sums, bytes and numbers are finite, in both modes."""
    stack.play(Say("hm</think>Hi 🦊 x", 2), Finish())
    choice, streamed = both_ways(stack, logprobs=True, top_logprobs=2)
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "hm</think>Hi 🦊 x".encode()
    assert streamed.logprobs == entries
    for entry in entries:
        assert entry["logprob"] == -0.5
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]
        assert "\ufffd" not in entry["token"]
    assert stack.sampling.logprobs == 2


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, -1),
        ({"logprobs": False}, -1),
        ({"logprobs": False, "top_logprobs": 0}, -1),
        ({"top_logprobs": 0}, -1),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
    ],
)
def test_logprobs_are_asked_of_the_worker_only_when_wanted(stack: Stack, fields: dict[str, Any], asked: int) -> None:
    """-1 is none, 0 the chosen token's only; without logprobs the field is null."""
    choice = stack.message(**fields)
    assert stack.sampling.logprobs == asked
    assert (choice["logprobs"] is None) == (asked < 0)


def test_characters_cut_between_tokens(stack: Stack) -> None:
    """Bytes of an emoji and of a Hangul syllable over several tokens, at the border of reasoning and in arguments: no U+FFFD."""
    fox, syllable = "🦊".encode(), "한".encode()
    pieces = [(0, fox[:2]), (0, fox[2:]), (IDS["</think>"], b"</think>"), (0, syllable[:1]), (0, syllable[1:])]
    pieces += [(IDS["<tool_call>"], b"<tool_call>"), (0, b"get_weather"), (IDS["<arg_key>"], b"<arg_key>"), (0, b"city")]
    pieces += [(IDS["</arg_key>"], b"</arg_key>"), (IDS["<arg_value>"], b"<arg_value>"), (0, fox[:1]), (0, fox[1:])]
    pieces += [(IDS["</arg_value>"], b"</arg_value>"), (IDS["</tool_call>"], b"</tool_call>")]
    stack.play(Pieces(pieces), Finish())
    choice, streamed = both_ways(stack, tools=[WEATHER])
    assert choice["message"]["reasoning_content"] == "🦊"
    assert choice["message"]["content"] == "한"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "🦊"}
    assert "\ufffd" not in json.dumps(streamed.chunks, ensure_ascii=False)


def test_sampling_fields_reach_the_worker(stack: Stack) -> None:
    """Every supported field arrives as it was sent."""
    stack.post(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=7,
        logit_bias={"5": -100, "6": 1.5},
        stop=["a", "b"],
        stop_token_ids=[3],
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    got = stack.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0, 0.5, -1, 0.1)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty, got.seed) == (1.5, -1, 2, 7)
    assert dict(got.logit_bias) == {5: -100, 6: 1.5}
    assert (list(got.stop), list(got.stop_token_ids), got.min_tokens, got.max_tokens) == (["a", "b"], [3], 2, 9)
    assert got.ignore_eos
    assert got.include_stop_str_in_output
    assert got.show_special_tokens


def test_absent_sampling_fields_stay_absent(stack: Stack) -> None:
    """What the client does not say is the checkpoint's to decide; max_tokens is the remaining context."""
    stack.post()
    got = stack.sampling
    assert not got.show_special_tokens
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
        assert not got.HasField(name), name
    assert got.max_tokens == 1000 - len(stack.worker.requests[0].prompt_token_ids)
    assert not any((got.stop, got.stop_token_ids, got.logit_bias, got.min_tokens, got.ignore_eos))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_beyond_the_context_is_cut_to_it(stack: Stack, name: str) -> None:
    """99999999 means: as many as fit."""
    assert stack.post(**{name: 99_999_999}).status_code == 200
    assert stack.sampling.max_tokens == 1000 - len(stack.worker.requests[0].prompt_token_ids)


def test_max_completion_tokens_is_the_newer_name(stack: Stack) -> None:
    """Where both are given, max_completion_tokens counts."""
    stack.post(max_tokens=5, max_completion_tokens=7)
    assert stack.sampling.max_tokens == 7


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (2**63 - 1, 2**63 - 1), (-2, 2**64 - 2), (-(2**63), 2**63), (-1, None)])
def test_seeds(stack: Stack, seed: int, sent: int | None) -> None:
    """Any 64-bit seed is one; -1 asks for a random one."""
    stack.post(seed=seed)
    assert (stack.sampling.seed if stack.sampling.HasField("seed") else None) == sent


def test_a_single_stop_string(stack: Stack) -> None:
    """`stop` may be a string; an empty list is no stop."""
    stack.post(stop="\nQ:")
    assert list(stack.sampling.stop) == ["\nQ:"]
    stack.post(stop=[])
    assert list(stack.sampling.stop) == []


@pytest.mark.parametrize(
    ("wanted", "kind", "schema"),
    [
        ({"type": "json_object"}, "any_json_object", None),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
            "json_schema",
            {"type": "object"},
        ),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_response_formats_become_grammars_where_the_worker_can(stack: Stack, wanted: Any, kind: str, schema: Any, thinking: bool) -> None:
    """The grammar begins after </think>, or at once when the prompt already closed it."""
    stack.worker.supports_grammar = True
    stack.play(Say("</think>{}"), Finish())
    stack.run(stack.services.watch.refresh())
    try:
        assert stack.post(response_format=wanted, chat_template_kwargs={"enable_thinking": thinking}).status_code == 200
    finally:
        stack.worker.supports_grammar = False
        stack.run(stack.services.watch.refresh())
    grammar = stack.worker.requests[0].grammar
    assert grammar.WhichOneof("kind") == kind
    assert grammar.after_token_id == (IDS["</think>"] if thinking else 0)
    assert schema is None or json.loads(grammar.json_schema) == schema


def test_response_format_text_asks_for_nothing(stack: Stack) -> None:
    """Plain text is the default by another name."""
    assert stack.post(response_format={"type": "text"}).status_code == 200
    assert not stack.worker.requests[0].HasField("grammar")


def test_two_requests_with_one_request_id(stack: Stack) -> None:
    """X-Request-Id is echoed and never names the job: both requests run under ids of our own."""
    for _ in range(2):
        response = stack.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
    assert len({request.request_id for request in stack.worker.requests} - {"mine"}) == 2


@pytest.mark.parametrize("given", ["x" * 129, "x" * 1_000_000, "a b", "ä".encode().decode("latin-1"), "<script>", ""])
def test_odd_request_ids_are_replaced(stack: Stack, given: str) -> None:
    """Over-long and odd ids are replaced by one of ours, also on errors."""
    for body in ({"model": "tiny", "messages": HELLO}, {}):
        response = stack.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": given.encode("latin-1")})
        echoed = response.headers["x-request-id"]
        assert echoed != given
        assert len(echoed) == 32
