"""The gateway on the real worker with an untrained model: the contract between the two, without fakes."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.events import stream
from tests.gateway.language import TOKENIZER, encode
from tests.gateway.stack import HELLO, Stack, until
from tests.gateway.test_streams import raw_post, read_until
from tests.gateway.test_validation import check_error
from tests.support import random_checkpoint
from tests.worker.harness import RunningWorker

MODEL = "glm-5.3-tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway on a loaded worker."""
    directory = random_checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "model")
    worker = RunningWorker(model_dir=str(directory), shm_dir=str(tmp_path_factory.mktemp("shm")))
    stack = Stack(start_worker=False, worker_address=f"127.0.0.1:{worker.worker.port}")
    until(lambda: stack.http.get("/health").status_code == 200, "ready", 30)
    yield stack
    stack.close()
    worker.close()


def running(stack: Stack) -> int:
    return int(stack.http.get("/stats").json()["engine"]["running_requests"])


def test_the_model_is_listed(real: Stack) -> None:
    """Name and context come from the worker."""
    listed = real.http.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["max_model_len"]) for entry in listed] == [(MODEL, 16384)]


def test_streamed_and_whole_answers_agree(real: Stack) -> None:
    """Greedy noise is the same noise both ways, with true counts."""
    whole = real.post(CHAT, **GREEDY).json()
    streamed = stream(real, CHAT, **GREEDY, stream_options={"include_usage": True})
    message = whole["choices"][0]["message"]
    assert streamed.text("content") == (message["content"] or "")
    assert streamed.text("reasoning_content") == (message["reasoning_content"] or "")
    assert streamed.finish_reasons == [whole["choices"][0]["finish_reason"]] == ["length"]
    assert streamed.chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["usage"]["prompt_tokens"] == len(encode("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hello<|assistant|><think>"))


def test_a_seed_repeats_an_answer(real: Stack) -> None:
    """One seed, one answer; another seed, another answer."""
    fields = {**GREEDY, "temperature": 1.5, "max_tokens": 24, "prompt": "Hello"}
    texts = [real.post(TEXT, **fields, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_are_finite_and_sorted(real: Stack) -> None:
    """Each token comes with the asked number of alternatives, most likely first; greedy takes the first."""
    found = real.post(CHAT, **GREEDY, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    assert len(found) > 0
    for entry in found:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == pytest.approx(values[0])
        assert entry["logprob"] <= 0


def test_chat_and_responses_give_the_same_log_probabilities(real: Stack) -> None:
    """One seed, one answer, one set of values: those of the text in /v1/responses stand in chat's, in their order."""
    asked = {**GREEDY, "temperature": 1.2, "seed": 7, "reasoning_effort": "none"}
    chat = real.post(CHAT, **asked, logprobs=True, top_logprobs=3).json()["choices"][0]
    fields = {name: value for name, value in asked.items() if name != "max_tokens"} | {"input": "Hello", "max_output_tokens": 12}
    include = ["message.output_text.logprobs"]
    made = real.http.post("/v1/responses", json={**fields, "include": include, "top_logprobs": 3}).json()
    (part,) = [item["content"][0] for item in made["output"] if item["type"] == "message"]
    assert part["text"] == chat["message"]["content"]
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert len(part["logprobs"]) > 3


def test_a_stop_string_ends_the_text_before_it(real: Stack) -> None:
    """What the worker cuts never shows, streamed or whole, and the finish reason is stop."""
    fields = {**GREEDY, "max_tokens": 40, "prompt": "Hello"}
    text = real.post(TEXT, **fields).json()["choices"][0]["text"]
    cut = next(text[at : at + 3] for at in range(4, len(text) - 3) if text.index(text[at : at + 3]) == at)
    choice = real.post(TEXT, **fields, stop=cut).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(cut)], "stop")
    streamed = stream(real, TEXT, **fields, stop=[cut])
    assert "".join(part["text"] for part in streamed.choices) == choice["text"]


def test_forbidden_tokens_stay_away(real: Stack) -> None:
    """logit_bias -100 reaches the sampler: the greedy token of before is not chosen any more."""
    fields = {**GREEDY, "max_tokens": 1, "prompt": [5, 6, 7], "logprobs": 1, "skip_special_tokens": False}
    first = real.post(TEXT, **fields).json()["choices"][0]["logprobs"]
    token = next(iter(first["tokens"]), None)
    assert token is not None
    ids = encode(token)
    assert len(ids) == 1
    second = real.post(TEXT, **fields, logit_bias={str(ids[0]): -100}).json()["choices"][0]["logprobs"]
    assert second["tokens"] != first["tokens"]


def test_bad_words_and_allowed_tokens_hold_in_real_outputs(real: Stack) -> None:
    """Words that the model would write are gone, in every form asked for; allowed ids alone come, and with nothing left it is 400."""
    fields: dict[str, Any] = {**GREEDY, "max_tokens": 40, "prompt": "Hello", "skip_special_tokens": False, "return_token_ids": True}
    free = real.post(TEXT, **fields).json()["choices"][0]["token_ids"]
    words = [TOKENIZER.decode(free[at : at + 2]) for at in (3, 10, 20)] + [TOKENIZER.decode(free[:1])]
    words = [word for word in words if word.strip() and "\ufffd" not in word]
    assert words
    bad = [encode(form) for word in words for form in (word, " " + word.lstrip())]
    for more in ({}, {"temperature": 2.0, "seed": 4}):
        response = real.post(TEXT, **fields | more, bad_words=words)
        assert response.status_code == 200, response.text
        ids = response.json()["choices"][0]["token_ids"]
        assert len(ids) == 40
        assert not [word for word in bad for at in range(len(ids)) if ids[at : at + len(word)] == word]
    few = sorted(set(free))[:3]
    ids = real.post(TEXT, **fields, allowed_token_ids=few).json()["choices"][0]["token_ids"]
    assert len(ids) == 40
    assert set(ids) <= set(few)
    only = encode("a")
    assert len(only) == 1
    error = check_error(real.post(TEXT, **fields, allowed_token_ids=only, bad_words=["a"]), "allowed_token_ids")
    assert "bad_words" in error["message"]


def test_prompt_logprobs_are_those_that_echo_shows(real: Stack) -> None:
    """Scored by themselves, beside an answer, for a chat's rendered prompt: the same numbers, with true ranks."""
    ids = encode("Hello you, Paris is a city. " * 20)
    echoed = real.post(TEXT, **GREEDY, prompt=ids, echo=True, logprobs=5).json()["choices"][0]["logprobs"]
    alone = real.post(TEXT, **GREEDY | {"max_tokens": 0}, prompt=ids, prompt_logprobs=5).json()["choices"][0]["prompt_logprobs"]
    beside = real.post(TEXT, **GREEDY, prompt=ids, n=2, prompt_logprobs=5).json()["choices"]
    assert alone == beside[0]["prompt_logprobs"] == beside[1]["prompt_logprobs"]
    assert alone[0] is None
    assert len(alone) == len(ids)
    for entry, token, logprob in zip(alone[1:], ids[1:], echoed["token_logprobs"][1 : len(ids)], strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(logprob)
        assert len(entry) == (5 if own["rank"] <= 5 else 6)
        others = sorted((other for other in entry.values() if other["rank"] <= 5), key=lambda other: other["rank"])
        assert [other["rank"] for other in others] == [1, 2, 3, 4, 5]
        assert [other["logprob"] for other in others] == sorted((other["logprob"] for other in others), reverse=True)
        assert own["rank"] <= 5 or own["logprob"] <= others[-1]["logprob"]
    chat = real.post(CHAT, **GREEDY, prompt_logprobs=0, return_token_ids=True).json()
    prompt = chat["prompt_token_ids"]
    raw = real.post(TEXT, **GREEDY | {"max_tokens": 0}, prompt=prompt, prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"]
    assert chat["prompt_logprobs"] == raw
    assert [list(entry) for entry in raw[1:]] == [[str(token)] for token in prompt[1:]]


def test_off_is_off_and_zero_is_greedy(real: Stack) -> None:
    """top_k -1 and 0 draw as without it, top_k 1 does not; temperature 0 takes the likeliest token whatever the seed."""

    def drawn(**fields: Any) -> str:
        return str(real.post(TEXT, model=MODEL, prompt="Hello", max_tokens=12, ignore_eos=True, **fields).json()["choices"][0]["text"])

    free = drawn(seed=5, temperature=1.5)
    assert drawn(seed=5, temperature=1.5, top_k=-1) == drawn(seed=5, temperature=1.5, top_k=0) == free
    greedy = drawn(seed=5, temperature=0)
    assert drawn(seed=6, temperature=0) == drawn(seed=5, temperature=1.5, top_k=1) == greedy != free


def test_a_prompt_beyond_the_context_is_refused(real: Stack) -> None:
    """A prompt of the whole context is refused with the worker's own number."""
    error = check_error(real.post(TEXT, model=MODEL, prompt=[5] * 16384), "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "16384" in error["message"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("prompt_tokens", [8, 12000], ids=["in mid-answer", "in prefill"])
def test_a_client_that_leaves_frees_the_row(real: Stack, streaming: bool, prompt_tokens: int) -> None:
    """A disconnect takes the job out of the engine, before its first token and after it."""
    body = {**GREEDY, "max_tokens": 4000, "prompt": [5] * prompt_tokens, "stream": streaming}
    with raw_post(real, body, TEXT) as connection:
        until(lambda: running(real) == 1, "the job runs")
        if streaming and prompt_tokens == 8:
            read_until(connection, b"data:")
        else:
            time.sleep(0.1)
    until(lambda: running(real) == 0, "the row is free", 5)
    assert real.post(TEXT, **GREEDY, prompt="Hello").status_code == 200


def test_eight_streams_at_once_keep_apart(real: Stack) -> None:
    """Eight different prompts together give what each gives alone."""
    prompts = ["Hello " * count for count in range(1, 9)]
    alone = [real.post(TEXT, **GREEDY, prompt=prompt).json()["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: real.post(TEXT, **GREEDY, prompt=prompt).json()["choices"][0]["text"], prompts))
    assert together == alone


def test_tools_and_their_results_are_taken(real: Stack) -> None:
    """A conversation with tools, calls and results goes through; noise calls nothing, and is passed on."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "é"})}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "17"},
    ]
    response = real.post(CHAT, **GREEDY, tools=tools, messages=messages)
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_the_scrape_of_both_parses(real: Stack) -> None:
    """Gateway and worker samples together are valid Prometheus text without a name given twice."""
    names = [family.name for family in text_string_to_metric_families(real.http.get("/metrics").text)]
    assert len(names) == len(set(names))
    assert any(name.startswith("glm53_gateway_") for name in names)
    assert any(not name.startswith("glm53_gateway_") for name in names)


def test_the_checkpoints_files_arrive(real: Stack, pytestconfig: pytest.Config) -> None:
    """The gateway tokenises with the worker's files: its vocabulary is the checkpoint's."""
    document = json.loads((pathlib.Path(pytestconfig.rootpath) / "models/tiny/checkpoint/tokenizer.json").read_text())
    _, language = real.run(real.services.watch.ready())
    assert language.tokenizer.vocab_size == len(document["model"]["vocab"]) + len(document["added_tokens"])
