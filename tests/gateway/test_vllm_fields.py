"""Fields of vLLM that say what may come, what the prompt was worth, and which tokens there were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.sampling import bad_word_ids
from tests.gateway.events import stream
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.language import TOKENIZER, encode
from tests.gateway.stack import HELLO, Stack
from tests.gateway.test_validation import check_error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, TEXT)
ELSEWHERE: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/responses", {"model": "tiny", "input": "Hello"}, None),
    ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 5}, None),
    ("/generate", {"text": "Hello"}, "sampling_params"),
]


def words_sent(stack: Stack) -> list[list[int]]:
    return [list(word.token_ids) for word in stack.sampling.bad_words]


@pytest.mark.parametrize("path", BOTH)
def test_bad_words_become_tokens_as_they_may_stand_in_an_output(stack: Stack, path: str) -> None:
    """With and without a space before them, however the client wrote them; control tokens count as such; nothing twice."""
    assert stack.post(path, bad_words=["Paris", " Rome", "</think>", "\n"]).status_code == 200
    texts = ["Paris", " Paris", " Rome", "Rome", "</think>", " </think>", "\n"]
    assert words_sent(stack) == [encode(text) for text in texts]
    assert stack.post(path, bad_words=["Paris", "Paris", " Paris"]).status_code == 200
    assert words_sent(stack) == [encode("Paris"), encode(" Paris")]
    assert stack.post(path, bad_words=[]).status_code == 200
    assert words_sent(stack) == []


@given(word=st.text(min_size=1, max_size=12))
async def test_every_word_is_forbidden_in_the_forms_that_it_was_asked_for(word: str) -> None:
    """No form is lost to white space, whatever the text."""
    found = [list(sequence.token_ids) for sequence in await bad_word_ids([word], TOKENIZER)]
    assert found[0] == encode(word)
    assert all(found)
    if word.strip():
        assert encode(" " + word.lstrip()) in found


@pytest.mark.parametrize(("path", "body", "inside"), ELSEWHERE)
def test_the_other_apis_take_both_limits(stack: Stack, path: str, body: dict[str, Any], inside: str | None) -> None:
    """Responses, messages and generate hand them on."""
    limits = {"bad_words": ["Paris"], "allowed_token_ids": [7, 5]}
    assert stack.http.post(path, json=body | ({inside: limits} if inside else limits)).status_code == 200
    assert words_sent(stack) == [encode("Paris"), encode(" Paris")]
    assert list(stack.sampling.allowed_token_ids) == [7, 5]


@pytest.mark.parametrize(("path", "body", "inside"), ELSEWHERE)
@pytest.mark.parametrize("name", ["prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens"])
def test_what_only_two_urls_have_is_refused_elsewhere_with_their_names(
    stack: Stack, path: str, body: dict[str, Any], inside: str | None, name: str
) -> None:
    """The answers of the other APIs have no place for it."""
    field = {name: True if name.startswith("return") else 3}
    error = stack.http.post(path, json=body | ({inside: field} if inside else field)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", inside or name)
    assert "use /v1/chat/completions or /v1/completions" in error["message"]
    assert not stack.worker.requests


def prompt_entry(position: int, token_id: int, top: int) -> dict[str, Any]:
    """What the fake worker's log-probabilities look like in vLLM's shape."""
    named = {str(rank): {"logprob": -rank, "rank": rank + 1, "decoded_token": TOKENIZER.decode([rank])} for rank in range(top)}
    own = {"logprob": -position / 4, "rank": position + 7, "decoded_token": TOKENIZER.decode([token_id])}
    return {str(token_id): own} | named


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_of_a_completion(stack: Stack, top: int) -> None:
    """One entry a token in each choice of each prompt, None first; the worker is asked once a prompt."""
    prompts = ["Hello you", "Hi"]
    answer = stack.post(TEXT, prompt=prompts, n=2, prompt_logprobs=top, logprobs=1).json()
    for index, choice in enumerate(answer["choices"]):
        ids = encode(prompts[index // 2])
        assert choice["prompt_logprobs"] == [None, *(prompt_entry(i, ids[i], top) for i in range(1, len(ids)))]
        assert choice["logprobs"]["tokens"] == ["Hello"]
    assert [(request.prompt_logprobs, request.prompt_top) for request in sorted(stack.worker.requests, key=lambda r: r.request_id)] == [
        (True, top),
        (False, top),
        (True, top),
        (False, top),
    ]
    assert "prompt_logprobs" not in stack.post(TEXT).json()["choices"][0]


def test_prompt_logprobs_beside_echo_keep_their_own_count(stack: Stack) -> None:
    """echo shows as many alternatives as logprobs asks for, prompt_logprobs its own number, whichever is larger."""
    for logprobs, top in ((1, 3), (3, 1)):
        choice = stack.post(TEXT, prompt="Hello you", echo=True, logprobs=logprobs, prompt_logprobs=top).json()["choices"][0]
        ids = encode("Hello you")
        assert choice["prompt_logprobs"] == [None, *(prompt_entry(i, ids[i], top) for i in range(1, len(ids)))]
        shown = choice["logprobs"]["top_logprobs"][: len(ids)]
        assert shown[0] is None
        assert [len(entry) for entry in shown[1:]] == [logprobs + 1] * (len(ids) - 1)


def test_a_prompt_is_scored_without_an_answer(stack: Stack) -> None:
    """max_tokens 0 with prompt_logprobs alone goes through Score."""
    answer = stack.post(TEXT, prompt="Hello you", max_tokens=0, prompt_logprobs=2).json()
    ids = encode("Hello you")
    assert answer["choices"][0]["prompt_logprobs"] == [None, *(prompt_entry(i, ids[i], 2) for i in range(1, len(ids)))]
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    assert [request.top for request in stack.worker.scored] == [2]
    assert not stack.worker.requests


def test_prompt_logprobs_of_a_chat(stack: Stack) -> None:
    """On the answer itself, for the rendered prompt; the worker is asked by the first choice only."""
    stack.play(Say("</think>x"), Finish())
    answer = stack.post(n=2, prompt_logprobs=1).json()
    ids = list(stack.worker.requests[0].prompt_token_ids)
    assert answer["prompt_logprobs"] == [None, *(prompt_entry(i, ids[i], 1) for i in range(1, len(ids)))]
    assert sorted(request.prompt_logprobs for request in stack.worker.requests) == [False, True]
    assert "prompt_logprobs" not in stack.post().json()


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("count", [0, 1])
def test_prompt_logprobs_are_refused_in_a_stream(stack: Stack, path: str, count: int) -> None:
    """As vLLM does."""
    check_error(stack.post(path, prompt_logprobs=count, stream=True), "prompt_logprobs")
    assert not stack.worker.requests


@pytest.mark.parametrize(("kept", "length"), [(3, 3), (1000, 5), (-1, 5)])
@pytest.mark.parametrize("prompt", ["Hello you, Paris", encode("Hello you, Paris")])
def test_a_prompt_is_cut_at_its_beginning(stack: Stack, prompt: Any, kept: int, length: int) -> None:
    """The last tokens stay; echo repeats what was kept."""
    ids = encode("Hello you, Paris")
    length = length if kept == 3 else len(ids)
    choice = stack.post(TEXT, prompt=prompt, truncate_prompt_tokens=kept, echo=True, max_tokens=5).json()["choices"][0]
    assert list(stack.worker.requests[0].prompt_token_ids) == ids[-length:]
    assert choice["text"] == TOKENIZER.decode(ids[-length:]) + "Hello"


@pytest.mark.parametrize("path", BOTH)
def test_a_prompt_is_cut_to_what_fits(stack: Stack, path: str) -> None:
    """-1 leaves the room that the answer was promised, in a text, in token ids and in a conversation; without it such a prompt is 400."""
    long = "Hello " * 3000
    texts: list[Any] = [long] if path == CHAT else [long, [5] * 5000]
    for text in texts:
        fields = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        check_error(stack.post(path, **fields, max_tokens=20), "messages" if path == CHAT else "prompt")
        assert stack.post(path, **fields, max_tokens=20, truncate_prompt_tokens=-1).status_code == 200
        sent = stack.worker.requests[-1]
        assert (len(sent.prompt_token_ids), sent.sampling.max_tokens) == (980, 20)
        assert stack.post(path, **fields, truncate_prompt_tokens=-1).status_code == 200
        sent = stack.worker.requests[-1]
        assert (len(sent.prompt_token_ids), sent.sampling.max_tokens) == (999, 1)


def test_a_cut_conversation_keeps_its_end(stack: Stack) -> None:
    """The model still begins where the template leaves it."""
    stack.play(Say("thought</think>word"), Finish())
    whole = stack.post().json()
    answer = stack.post(truncate_prompt_tokens=4).json()
    full, cut = (list(request.prompt_token_ids) for request in stack.worker.requests)
    assert cut == full[-4:]
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["prompt_tokens"] == 4


def test_token_ids_of_a_completion(stack: Stack) -> None:
    """Those of the prompt and of the output stand in each choice; in a stream the prompt's come once, the others as they come."""
    stack.play(Say("a b </think> c"), Finish())
    fields: dict[str, Any] = {"prompt": ["Hello you", "Hi"], "return_token_ids": True}
    output = encode("a b </think> c")
    choices = stack.post(TEXT, **fields).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [encode("Hello you"), encode("Hi")]
    assert [choice["token_ids"] for choice in choices] == [output, output]
    streamed = stream(stack, TEXT, **fields)
    for index, prompt in enumerate(["Hello you", "Hi"]):
        parts = [part for part in streamed.choices if part["index"] == index]
        assert [part.get("prompt_token_ids") for part in parts] == [encode(prompt)] + [None] * (len(parts) - 1)
        assert [token for part in parts for token in part["token_ids"]] == output
    assert "token_ids" not in stack.post(TEXT).json()["choices"][0]


def test_token_ids_of_a_chat(stack: Stack) -> None:
    """As vLLM has them: the prompt's on the answer and on the first chunk, the output's in each choice, thoughts and all."""
    stack.play(Say("thought</think>a b"), Finish())
    answer = stack.post(n=2, return_token_ids=True).json()
    prompt, output = list(stack.worker.requests[0].prompt_token_ids), encode("thought</think>a b")
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [output, output]
    streamed = stream(stack, n=2, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in streamed.chunks] == [prompt] + [None] * (len(streamed.chunks) - 1)
    for index in (0, 1):
        assert [token for part in streamed.choices if part["index"] == index for token in part["token_ids"]] == output
    assert "token_ids" not in stack.post().json()["choices"][0]


def test_log_probabilities_name_tokens_by_their_ids(stack: Stack) -> None:
    """return_tokens_as_token_ids: for tokens that are no text of their own."""
    stack.play(Say("a b"), Finish())
    content = stack.post(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
    names = [f"token_id:{token}" for token in encode("a b")]
    assert [entry["token"] for entry in content] == names
    assert [entry["top_logprobs"][0]["token"] for entry in content] == [f"token_id:{encode('a')[0]}"] * len(names)
    fields: dict[str, Any] = {"logprobs": 1, "echo": True, "prompt": "Hi", "return_tokens_as_token_ids": True}
    found = stack.post(TEXT, **fields).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in encode("Hi")] + names
    assert all(name.startswith("token_id:") for entry in found["top_logprobs"][1:] for name in entry)
    streamed = stream(stack, TEXT, **fields)
    assert [name for part in streamed.choices for name in part["logprobs"]["tokens"]] == found["tokens"]


@pytest.mark.parametrize("path", BOTH)
def test_spaces_between_special_tokens_change_nothing(stack: Stack, path: str) -> None:
    """No text of ours has spaces that no token brought, whatever is asked for."""
    stack.play(Say("</think>a<|user|> b"), Finish())
    for asked in (True, False):
        choice = stack.post(path, spaces_between_special_tokens=asked, skip_special_tokens=False).json()["choices"][0]
        assert (choice["text"] if path == TEXT else choice["message"]["content"]).endswith("a<|user|> b")
