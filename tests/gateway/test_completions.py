"""/v1/completions: raw prompts, raw text."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.events import Streamed, stream
from tests.gateway.fake_worker import Finish, Pieces, Say
from tests.gateway.language import IDS, encode
from tests.gateway.stack import Stack

PATH = "/v1/completions"


def both_ways(stack: Stack, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same request whole and streamed, checked to agree."""
    response = stack.post(PATH, **fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    streamed = stream(stack, PATH, **fields)
    assert streamed.done
    assert "".join(part["text"] for part in streamed.choices) == choice["text"]
    assert streamed.finish_reasons == [choice["finish_reason"]]
    return choice, streamed


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hello", encode("Hello")),
        (["Hello"], encode("Hello")),
        ("<|user|>Hi<|assistant|>", [IDS["<|user|>"], *encode("Hi"), IDS["<|assistant|>"]]),
        ([5, 6, 7], [5, 6, 7]),
        ([[5, 6, 7]], [5, 6, 7]),
    ],
)
def test_prompts(stack: Stack, prompt: Any, ids: list[int]) -> None:
    """A string, its control tokens included, or token ids, alone or as a list of one."""
    assert stack.post(PATH, prompt=prompt).status_code == 200
    assert list(stack.worker.requests[0].prompt_token_ids) == ids
    assert stack.sampling.max_tokens == 1000 - len(ids)


def test_the_shape_of_an_answer(stack: Stack) -> None:
    """Every field that OpenAI's clients read."""
    stack.play(Say("a b"), Finish(pb.FINISH_REASON_LENGTH))
    answer = stack.post(PATH).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "a b", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("text", ["", "a 🦊 b", "think</think>x<tool_call>f</tool_call>", "line\n\nline\u2028end"])
def test_text_is_passed_on_as_it_is(stack: Stack, text: str) -> None:
    """No reasoning and no calls are taken out of raw text, streamed or whole."""
    stack.play(Say(text, 2), Finish())
    assert both_ways(stack)[0]["text"] == text


def test_special_tokens_are_hidden_unless_asked_for(stack: Stack) -> None:
    """<|user|> and the like show with skip_special_tokens false only."""
    stack.play(Say("a<|user|>b"), Finish())
    assert both_ways(stack)[0]["text"] == "ab"
    assert both_ways(stack, skip_special_tokens=False)[0]["text"] == "a<|user|>b"


def test_a_character_over_two_tokens(stack: Stack) -> None:
    """No chunk holds half a character."""
    fox = "🦊".encode()
    stack.play(Pieces([(0, b"a" + fox[:2]), (0, fox[2:] + b"b")]), Finish())
    choice, streamed = both_ways(stack)
    assert choice["text"] == "a🦊b"
    assert [part["text"] for part in streamed.choices] == ["a", "🦊b", ""]


@pytest.mark.parametrize("asked", [0, 2])
def test_logprobs(stack: Stack, asked: int) -> None:
    """Tokens, their log-probabilities, the most likely others and character offsets; 0 is a request, too."""
    stack.play(Say("ab c 🦊 d", 3), Finish())
    choice, streamed = both_ways(stack, logprobs=asked)
    found = choice["logprobs"]
    assert stack.sampling.logprobs == asked
    count = len(encode("ab c 🦊 d"))
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
    assert found["token_logprobs"] == [-0.5] * count
    assert all(len(top) >= 1 for top in found["top_logprobs"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    for name in found:
        assert [entry for part in streamed.choices for entry in part["logprobs"][name]] == found[name]


def test_usage_in_streams(stack: Stack) -> None:
    """include_usage adds one last chunk with empty choices."""
    streamed = stream(stack, PATH, stream_options={"include_usage": True})
    assert streamed.chunks[-1]["choices"] == []
    assert streamed.chunks[-1]["usage"]["total_tokens"] == stack.post(PATH).json()["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in streamed.chunks[:-1])
