"""Several choices and several prompts in one request; prompts that are repeated and scored; answers that are continued."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from services.common.errors import EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.prompt import PromptTail, Thinking
from tests.gateway.events import Streamed, stream
from tests.gateway.fake_worker import Fail, Finish, Forever, Say, Script, Wait
from tests.gateway.language import IDS, NAMES, encode, piece
from tests.gateway.stack import HELLO, Stack, until
from tests.gateway.test_validation import check_error

TEXT = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}


def number_of(request: pb.GenerateRequest) -> int:
    return int(request.request_id.partition("-")[2] or 0)


def play_each(stack: Stack, *texts: str, reason: int = pb.FINISH_REASON_STOP) -> None:
    """Choice i says text i, one token an event."""
    stack.worker.script_for = lambda request: Script((Say(texts[number_of(request)]), Wait(0.002), Finish(reason)))


def choices_of(streamed: Streamed, count: int) -> list[list[dict[str, Any]]]:
    return [[choice for choice in streamed.choices if choice["index"] == index] for index in range(count)]


TEXTS = ("a</think>one", "bb</think>two<tool_call>f<arg_key>x</arg_key><arg_value>é🦊</arg_value></tool_call>", "</think>three")


def test_n_choices_have_a_parser_each(stack: Stack) -> None:
    """Each choice has its own reasoning, content and calls under its own index, in one answer with one usage."""
    play_each(stack, *TEXTS)
    answer = stack.post(n=3, tools=[TOOL]).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    messages = [choice["message"] for choice in answer["choices"]]
    assert [m["content"] for m in messages] == ["one", "two", "three"]
    assert [m["reasoning_content"] for m in messages] == ["a", "bb", None]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "tool_calls", "stop"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x": "é🦊"}'
    prompt = len(stack.worker.requests[0].prompt_token_ids)
    completion = sum(len(encode(text)) + 1 for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["completion_tokens"] == completion
    assert answer["usage"]["total_tokens"] == prompt + completion


def test_n_choices_stream_interleaved_and_whole(stack: Stack) -> None:
    """Streamed choices keep apart: role once each, deltas as in the whole answer, n finish chunks, one usage chunk, one [DONE]."""
    play_each(stack, *TEXTS)
    whole = stack.post(n=3, tools=[TOOL]).json()
    streamed = stream(stack, n=3, tools=[TOOL], stream_options={"include_usage": True})
    assert streamed.done
    for index, parts in enumerate(choices_of(streamed, 3)):
        message = whole["choices"][index]["message"]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"].get("content") or "" for part in parts) == message["content"]
        assert "".join(part["delta"].get("reasoning_content") or "" for part in parts) == (message["reasoning_content"] or "")
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [whole["choices"][index]["finish_reason"]]
        arguments = [call["function"]["arguments"] for part in parts for call in part["delta"].get("tool_calls") or []]
        assert "".join(arguments) == ("" if index != 1 else message["tool_calls"][0]["function"]["arguments"])
    assert streamed.chunks[-1]["choices"] == []
    assert streamed.chunks[-1]["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in streamed.chunks[:-1]] == [None] * (len(streamed.chunks) - 1)


@pytest.mark.parametrize("texts", [("", "</think>"), ("</think><tool_call>f</tool_call>", ""), ("</think>x", "hm")])
def test_every_choice_has_its_role_in_its_first_chunk(stack: Stack, texts: tuple[str, str]) -> None:
    """Once per index, also where a choice begins with a call or ends at once."""
    play_each(stack, *texts)
    for parts in choices_of(stream(stack, n=2, tools=[TOOL]), 2):
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert len([part for part in parts if part["finish_reason"]]) == 1


def test_choices_draw_for_themselves(stack: Stack) -> None:
    """Seeds are derived: the first choice draws as a request of its own would, the others differently, and the same every time."""
    stack.post(n=3, seed=7)
    first = {number_of(r): r.sampling.seed for r in stack.worker.requests}
    stack.worker.requests.clear()
    stack.post(n=3, seed=7)
    assert {number_of(r): r.sampling.seed for r in stack.worker.requests} == first
    assert first[0] == 7
    assert len(set(first.values())) == 3
    stack.worker.requests.clear()
    stack.post(n=2)
    assert not any(r.sampling.HasField("seed") for r in stack.worker.requests)
    assert len({r.request_id for r in stack.worker.requests}) == 2


def test_one_choice_that_fails_ends_the_request(stack: Stack) -> None:
    """The error is the answer, and the other choices leave the worker."""
    stack.worker.script_for = lambda r: Script((Fail(EngineFailed("broken")),) if number_of(r) == 1 else (Say("x"), Forever()))
    assert stack.post(n=3).status_code == 500
    until(lambda: not stack.worker.live, "no choice runs on")
    streamed = stream(stack, n=3)
    assert streamed.error is not None
    assert streamed.error["message"] == "broken"
    assert streamed.done
    until(lambda: not stack.worker.live, "no choice runs on")


def test_a_client_that_leaves_takes_all_choices_along(stack: Stack) -> None:
    """A disconnect cancels every generation of the request."""
    stack.play(Say("x"), Forever())
    with stack.http.stream("POST", "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "n": 4, "stream": True}) as response:
        assert response.status_code == 200
        until(lambda: len(stack.worker.live) == 4, "all run")
    until(lambda: not stack.worker.live, "none runs")


def test_many_choices_wait_here_and_not_in_the_worker(stack: Stack) -> None:
    """At most so many generations of one request run at once; the rest follow."""
    most, lock = [0], threading.Lock()

    def script(_request: pb.GenerateRequest) -> Script:
        with lock:
            most[0] = max(most[0], len(stack.worker.live))
        return Script((Wait(0.01), Say("x"), Finish()))

    stack.worker.script_for = script
    answer = stack.post(TEXT, prompt=["a"] * 10, n=3).json()
    assert len(answer["choices"]) == 30
    assert most[0] <= 8


@pytest.mark.parametrize("prompts", [["Hello", "a b"], [encode("Hello"), encode("a b")]], ids=["text", "token ids"])
def test_list_prompts(stack: Stack, prompts: list[Any]) -> None:
    """Choices come prompt by prompt; prompts count once in the usage."""
    texts = ("1", "2", "3", "4")
    play_each(stack, *texts)
    answer = stack.post(TEXT, prompt=prompts, n=2).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    by_number = {number_of(r): list(r.prompt_token_ids) for r in stack.worker.requests}
    assert by_number == {0: encode("Hello"), 1: encode("Hello"), 2: encode("a b"), 3: encode("a b")}
    assert answer["usage"]["prompt_tokens"] == len(encode("Hello")) + len(encode("a b"))
    streamed = stream(stack, TEXT, prompt=prompts, n=2)
    assert ["".join(part["text"] for part in parts) for parts in choices_of(streamed, 4)] == list(texts)


def test_too_many_choices_are_refused(stack: Stack) -> None:
    """There is a bound on what one request can start."""
    check_error(stack.post(TEXT, prompt=["a"] * 600, n=2), "prompt")


@pytest.mark.parametrize("prompt", ["Hello <|user|>é", encode("Hello <|user|>é")], ids=["text", "token ids"])
def test_echo_repeats_the_prompt(stack: Stack, prompt: Any) -> None:
    """The prompt's text stands before the completion, streamed or whole."""
    stack.play(Say(" you"), Finish())
    answer = stack.post(TEXT, prompt=prompt, echo=True).json()
    assert answer["choices"][0]["text"] == "Hello <|user|>é you"
    assert answer["choices"][0]["logprobs"] is None
    streamed = stream(stack, TEXT, prompt=prompt, echo=True)
    assert "".join(part["text"] for part in streamed.choices) == "Hello <|user|>é you"
    assert not stack.worker.requests[0].prompt_logprobs


def test_echo_with_logprobs_scores_the_prompt(stack: Stack) -> None:
    """lm-eval's request: log-probabilities of the prompt's own tokens, null for the first, offsets into the echoed text."""
    stack.play(Say("x", logprobs=True), Finish(pb.FINISH_REASON_LENGTH))
    ids = encode("Hello wörld")
    for prompt in ("Hello wörld", ids):
        found = stack.post(TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
        logprobs = found["logprobs"]
        pieces = [piece(number) for number in ids] + [b"x"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert logprobs["token_logprobs"] == [None, *(-i / 4 for i in range(1, len(ids))), -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) >= 1 for top in logprobs["top_logprobs"][1:])
        for offset, data in zip(logprobs["text_offset"], pieces, strict=True):
            assert found["text"][offset:].encode().startswith(data) or not data.isascii()
        assert stack.worker.requests[-1].prompt_logprobs
    streamed = stream(stack, TEXT, prompt="Hello wörld", echo=True, logprobs=1, max_tokens=1)
    values = [value for part in streamed.choices for value in part["logprobs"]["token_logprobs"]]
    assert values == logprobs["token_logprobs"]


def test_scoring_without_an_answer(stack: Stack) -> None:
    """max_tokens 0 with echo asks the worker for scores alone, for each prompt of a list."""
    answer = stack.post(TEXT, prompt=["Hello", "a b", "a b c"], echo=True, logprobs=2, max_tokens=0).json()
    assert not stack.worker.requests
    assert [(list(r.token_ids), r.first_scored, r.top) for r in stack.worker.scored] == [(encode("a b"), 1, 2), (encode("a b c"), 1, 2)]
    texts = ("Hello", "a b", "a b c")
    assert len(encode("Hello")) == 1
    for choice, text in zip(answer["choices"], texts, strict=True):
        ids = encode(text)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 4 for i in range(1, len(ids)))]
        assert "".join(choice["logprobs"]["tokens"]) == text
    total = sum(len(encode(text)) for text in texts)
    assert answer["usage"] == {
        "prompt_tokens": total,
        "completion_tokens": 0,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_nothing_to_answer_is_refused(stack: Stack) -> None:
    """max_tokens 0 without echo."""
    check_error(stack.post(TEXT, max_tokens=0), "max_tokens")
    check_error(stack.post(max_tokens=0), "max_tokens")


@pytest.mark.parametrize(("given", "sent"), [(None, "NORMAL"), (0, "NORMAL"), (-1, "HIGH"), (-100, "HIGH"), (1, "BATCH")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", TEXT])
def test_priority(stack: Stack, path: str, given: int | None, sent: str) -> None:
    """vLLM's number becomes one of three bands; no key, or one with leave, may choose."""
    stack.post(path, priority=given)
    assert pb.Priority.Name(stack.worker.requests[-1].priority) == f"PRIORITY_{sent}"


@pytest.mark.parametrize("budget", [0, 5])
def test_thinking_budget(stack: Stack, budget: int) -> None:
    """The worker closes the reasoning after so many tokens; a prompt without reasoning needs no budget."""
    stack.post(thinking_token_budget=budget)
    assert stack.worker.requests[-1].thinking_budget == pb.ThinkingBudget(
        budget=budget, end_token_id=IDS["</think>"], forced_token_ids=[IDS["</think>"]]
    )
    stack.post(thinking_token_budget=budget, reasoning_effort="none")
    assert not stack.worker.requests[-1].HasField("thinking_budget")


def text_of(ids: Any) -> str:
    return b"".join(NAMES[number].encode() if number in NAMES else piece(number) for number in ids).decode()


CONTINUED = [
    ({"content": "The capital"}, "<think></think>The capital", PromptTail.CONTENT),
    ({"content": " spaced  "}, "<think></think> spaced  ", PromptTail.CONTENT),
    ({"content": "", "reasoning_content": "so far"}, "<think>so far", PromptTail.REASONING),
    ({"content": "The", "reasoning_content": "hm"}, "<think>hm</think>The", PromptTail.CONTENT),
    ({"content": "<think>short</think>"}, "<think>short</think>", PromptTail.CONTENT),
    ({"content": "<think>short</think>Then"}, "<think>short</think>Then", PromptTail.CONTENT),
    ({"content": "a<|user|>b"}, "<think></think>a<|user|>b", PromptTail.CONTENT),
]


@pytest.mark.parametrize(("last", "ending", "tail"), CONTINUED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("pair", [{}, {"add_generation_prompt": False}])
def test_the_last_message_is_continued(stack: Stack, last: dict[str, Any], ending: str, tail: PromptTail, pair: dict[str, Any]) -> None:
    """The prompt ends with the client's own text, control tokens in it as plain text, and the parser starts where it leaves the model."""
    stack.play(Say(" of"), Finish(pb.FINISH_REASON_LENGTH))
    choice = stack.message(messages=[*HELLO, {"role": "assistant", **last}], continue_final_message=True, **pair)
    ids = stack.worker.requests[-1].prompt_token_ids
    assert text_of(ids).endswith("<|user|>Hello<|assistant|>" + ending)
    assert list(ids).count(IDS["<|user|>"]) == 1
    field = "content" if tail is PromptTail.CONTENT else "reasoning_content"
    assert choice["message"][field] == " of"


def test_a_continued_message_can_be_echoed(stack: Stack) -> None:
    """echo repeats what is continued, streamed or whole."""
    stack.play(Say(" of"), Finish())
    fields = {"messages": [*HELLO, {"role": "assistant", "content": "The"}], "continue_final_message": True, "echo": True}
    assert stack.message(**fields)["message"]["content"] == "The of"
    assert stream(stack, **fields).text("content") == "The of"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "continue_final_message": True},
        {"messages": [*HELLO, {"role": "assistant", "content": "x"}], "continue_final_message": True, "add_generation_prompt": True},
        {
            "messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
            "continue_final_message": True,
        },
    ],
)
def test_what_cannot_be_continued_is_refused(stack: Stack, fields: dict[str, Any]) -> None:
    """A user's message, a call, or both of vLLM's switches at once."""
    check_error(stack.post(**fields), "continue_final_message")


def test_a_last_assistant_message_is_not_continued_by_itself(stack: Stack) -> None:
    """OpenAI answers with a new turn, and so does this server."""
    stack.post(messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert text_of(stack.worker.requests[-1].prompt_token_ids).endswith("</think>The<|assistant|><think>")


@pytest.mark.parametrize(("setting", "names"), [("reasoning", {"reasoning"}), ("both", {"reasoning", "reasoning_content"})])
def test_the_name_of_reasoning_is_a_setting(setting: str, names: set[str]) -> None:
    """Newer clients read `reasoning`; a server can use either name or both."""
    stack = Stack(reasoning_fields=setting)
    try:
        stack.play(Say("hm</think>yes"), Finish())
        message = stack.message()["message"]
        assert {name for name in ("reasoning", "reasoning_content") if message.get(name) == "hm"} == names
        streamed = stream(stack)
        for name in ("reasoning", "reasoning_content"):
            assert streamed.text(name) == ("hm" if name in names else "")
    finally:
        stack.close()


def test_thinking_tail_of_older_templates() -> None:
    """A template after which the model opens its reasoning itself leaves the parser undecided, and content loses its line breaks."""
    from services.gateway.parser import OutputParser, parse_all
    from services.gateway.prompt import ChatTemplate
    from tests.gateway.language import TOKENIZER, VOCABULARY, tokens_of

    template = ChatTemplate("<|user|>{{ messages[0].content }}<|assistant|>", TOKENIZER)
    prompt = template.prompt([{"role": "user", "content": "x"}], [], Thinking("max"))
    assert prompt.tail is PromptTail.UNDECIDED
    parser = OutputParser(VOCABULARY, prompt.tail, None, trim_newlines=True)
    deltas = parse_all(parser, tokens_of("\n<think>hm</think>\n\nyes\n"), stopped=True)
    texts: dict[str, str] = {}
    for delta in deltas:
        texts[delta.channel.value] = texts.get(delta.channel.value, "") + delta.text  # type: ignore[union-attr]
    assert texts == {"reasoning_content": "hm", "content": "yes\n"}
