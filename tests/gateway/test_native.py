"""SGLang-shaped endpoints, tokenisation, information, probes, and Idempotency-Key."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.common.errors import EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.events import Streamed
from tests.gateway.fake_worker import Fail, Finish, Say, Script, Wait
from tests.gateway.language import IDS, encode
from tests.gateway.stack import HELLO, MODEL, Stack, until
from tests.gateway.test_validation import check_error


def generate(stack: Stack, **fields: Any) -> Any:
    return stack.http.post("/generate", json=fields)


def test_generate_answers_in_sglangs_shape(stack: Stack) -> None:
    """Text, ids and meta_info; new tokens default to 128; no model is named."""
    stack.play(Say("a 🦊"), Finish(cached=2))
    answer = generate(stack, text="Hello", rid="mine").json()
    assert answer["text"] == "a 🦊"
    assert answer["output_ids"] == encode("a 🦊")
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (1, len(encode("a 🦊")) + 1, 2)
    assert meta["e2e_latency"] >= 0
    assert meta["weight_version"] == stack.http.get("/model_info").json()["weight_version"]
    assert stack.sampling.max_tokens == 128
    assert list(stack.worker.requests[0].prompt_token_ids) == encode("Hello")


def test_generate_streams_the_text_so_far(stack: Stack) -> None:
    """Every event carries everything so far; the last one equals the whole answer; [DONE] ends it."""
    stack.play(Say("one two three 🦊"), Finish(pb.FINISH_REASON_LENGTH))
    whole = generate(stack, input_ids=[5, 6]).json()
    streamed = Streamed.of(generate(stack, input_ids=[5, 6], stream=True).content)
    texts = [event["text"] for event in streamed.chunks]
    assert texts[-1] == whole["text"] == "one two three 🦊"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert streamed.chunks[-1]["output_ids"] == whole["output_ids"]
    assert streamed.chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": len(whole["output_ids"])}
    assert [event["meta_info"]["finish_reason"] for event in streamed.chunks[:-1]] == [None] * (len(texts) - 1)
    assert streamed.done


@pytest.mark.parametrize(
    ("prompts", "n"), [({"text": ["a", "b"]}, 1), ({"text": "a"}, 2), ({"input_ids": [[5], [6]]}, 2), ({"text": ["a"]}, 1)]
)
def test_generate_takes_batches(stack: Stack, prompts: dict[str, Any], n: int) -> None:
    """Several prompts or choices give a list, in order; a list of one stays a list."""
    count = n * len(next(iter(prompts.values()))) if isinstance(next(iter(prompts.values())), list) else n
    answer = generate(stack, **prompts, sampling_params={"n": n}).json()
    assert [entry["text"] for entry in answer] == ["Hello"] * count
    assert len({entry["meta_info"]["id"] for entry in answer}) == count
    streamed = Streamed.of(generate(stack, **prompts, sampling_params={"n": n}, stream=True).content)
    assert {event["index"] for event in streamed.chunks} == set(range(count))


def test_each_prompt_may_have_its_own_parameters(stack: Stack) -> None:
    """Lists of sampling_params, rid and the log-probability fields have one entry for each prompt; the rest counts for all."""
    stack.play(Say("xy", logprobs=True), Finish())
    answer = generate(
        stack,
        input_ids=[[5, 6], [7], [8, 9]],
        sampling_params=[{"temperature": 0.5, "stop": ["a"]}, {"max_new_tokens": 7, "sampling_seed": 3}, {"max_new_tokens": 0}],
        rid=["one", "two", "three"],
        return_logprob=[False, True, True],
        logprob_start_len=[-1, -1, 0],
        top_logprobs_num=[0, 2, 1],
        return_text_in_logprobs=True,
    ).json()
    first, second = sorted(stack.worker.requests, key=lambda request: -len(request.prompt_token_ids))
    assert (list(first.prompt_token_ids), first.sampling.temperature, list(first.sampling.stop)) == ([5, 6], 0.5, ["a"])
    assert (first.sampling.max_tokens, first.sampling.logprobs) == (128, -1)
    assert (list(second.prompt_token_ids), second.sampling.max_tokens, second.sampling.seed, second.sampling.logprobs) == ([7], 7, 3, 2)
    assert not second.sampling.HasField("temperature")
    assert [list(request.token_ids) for request in stack.worker.scored] == [[8, 9]]
    assert len({first.request_id, second.request_id, stack.worker.scored[0].request_id}) == 3
    assert [entry["meta_info"]["id"] for entry in answer] == ["one", "two", "three"]
    assert ["output_token_logprobs" in entry["meta_info"] for entry in answer] == [False, True, True]
    assert len(answer[1]["meta_info"]["output_top_logprobs"][0]) == 2
    assert [entry[1] for entry in answer[2]["meta_info"]["input_token_logprobs"]] == [8, 9]


@pytest.mark.parametrize("streaming", [False, True])
def test_lists_of_parameters_with_choices(stack: Stack, streaming: bool) -> None:
    """Choices come in the order of the prompts, streamed by index, and a list of one gives a list of one."""
    stack.worker.script_for = lambda request: Script([Say(f"{request.sampling.max_tokens}"), Finish()])
    fields = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 3, "n": 2}, {"max_new_tokens": 4, "n": 2}], "rid": ["x", "y"]}
    response = generate(stack, **fields, stream=streaming)
    answer = response.json() if not streaming else list({chunk["index"]: chunk for chunk in Streamed.of(response.content).chunks}.values())
    answer = answer if not streaming else sorted(answer, key=lambda chunk: chunk["index"])
    assert [entry["text"] for entry in answer] == ["3", "3", "4", "4"]
    assert [entry["meta_info"]["id"] for entry in answer] == ["x-0", "x-1", "y-0", "y-1"]
    single = generate(stack, text=["a"], sampling_params=[{"max_new_tokens": 3}]).json()
    assert [entry["text"] for entry in single] == ["3"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "sampling_params has 1 entries, but text has 2"),
        ({"text": ["a", "b"], "sampling_params": []}, "sampling_params", "sampling_params has 0 entries, but text has 2"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "sampling_params is a list, but text is one prompt"),
        ({"input_ids": [5], "rid": ["x"]}, "rid", "rid is a list, but input_ids is one prompt"),
        ({"input_ids": [[5], [6]], "rid": ["x"]}, "rid", "rid has 1 entries, but input_ids has 2"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob", "return_logprob has 1 entries"),
        ({"text": ["a", "b"], "logprob_start_len": [0] * 3}, "logprob_start_len", "logprob_start_len has 3 entries"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num", "top_logprobs_num has 1 entries"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params", "sampling_params: n must be the same"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"temperature": 9}]},
            "sampling_params[1]",
            "sampling_params[1].temperature must be ",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": -1}]},
            "sampling_params[1]",
            "sampling_params[1].min_new_tokens must be ",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": -1}]},
            "sampling_params",
            "sampling_params[1].max_new_tokens must be ",
        ),
        ({"text": ["a", "b"], "sampling_params": [{}, 5]}, "sampling_params", "sampling_params[1] must be "),
        ({"text": ["a", "b"], "sampling_params": [{}, {"stop_regex": "x"}]}, "sampling_params[1]", "sampling_params[1].stop_regex is not"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": 0}]}, "sampling_params[1]", "sampling_params[1].max_new_tokens 0"),
        ({"text": ["a", ""], "sampling_params": [{}, {}]}, "text", "text[1] must have at least one token"),
        ({"text": "a", "sampling_params": {"temperature": 9}}, "sampling_params", "sampling_params.temperature must be "),
        ({"text": "a", "sampling_params": {"sampling_seed": "x"}}, "sampling_params", "sampling_params.sampling_seed must be "),
        ({"text": ["a"] * 200, "sampling_params": [{"n": 128}] * 200}, "text", "25600 choices are more than 1024"),
    ],
)
def test_lists_of_parameters_are_checked(stack: Stack, fields: dict[str, Any], param: str, said: str) -> None:
    """Lengths fit, and what is wrong is named with the prompt's number and SGLang's own name."""
    assert check_error(generate(stack, **fields), param)["message"].startswith(said)
    assert not stack.worker.requests


def test_generate_gives_log_probabilities(stack: Stack) -> None:
    """[log-probability, id, text or null] of outputs, and of the prompt from logprob_start_len on."""
    stack.play(Say("xy", logprobs=True), Finish())
    ids = encode("Hello wörld")
    fields = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = generate(stack, **fields).json()["meta_info"]
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == [[None, ids[0]], *([-i / 4, ids[i]] for i in range(1, len(ids)))]
    assert meta["input_token_logprobs"][0][2] == "Hello"
    assert [entry[:2] for entry in meta["output_token_logprobs"]][: len(encode("xy"))] == [[-0.5, number] for number in encode("xy")]
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["output_top_logprobs"][0]) == 1
    only_output = generate(stack, input_ids=ids, return_logprob=True).json()["meta_info"]
    assert only_output["input_token_logprobs"] == []
    assert only_output["output_token_logprobs"][0] == [-0.5, encode("x")[0], None]
    late = generate(stack, **(fields | {"logprob_start_len": 2})).json()["meta_info"]
    assert [entry[1] for entry in late["input_token_logprobs"]] == ids[2:]


def test_generate_scores_given_tokens(stack: Stack) -> None:
    """Teacher forcing: no new tokens, only the scores of the given ones, through the worker's Score."""
    ids = encode("a b c")
    answer = generate(stack, input_ids=ids, return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}).json()
    assert not stack.worker.requests
    assert list(stack.worker.scored[0].token_ids) == ids
    assert answer["text"] == ""
    assert [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] == [None, *(-i / 4 for i in range(1, len(ids)))]
    assert answer["meta_info"]["completion_tokens"] == 0


def test_generates_sampling_reaches_the_worker(stack: Stack) -> None:
    """SGLang's names of sampling parameters."""
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "no_stop_trim": True,
        "sampling_seed": 4,
        "n": 1,
    }
    assert generate(stack, text="a", sampling_params=given).status_code == 200
    got = stack.sampling
    assert (got.max_tokens, got.min_tokens, got.temperature, got.top_p, got.top_k, got.min_p) == (9, 2, 0.5, 0.9, -1, 0.1)
    assert (got.frequency_penalty, got.presence_penalty, got.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (list(got.stop), list(got.stop_token_ids), got.ignore_eos, got.include_stop_str_in_output, got.seed) == (
        ["x"],
        [7],
        True,
        True,
        4,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [99999]}, "input_ids"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "sampling_params"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "rid": "x" * 129}, "rid"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_generate_refuses_by_name(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """Every field out of range is 400 under the client's own name for it."""
    check_error(generate(stack, **fields), param)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(stack: Stack, prefix: str) -> None:
    """A text, several texts, a conversation; and the text of ids again."""

    def ids_of(**fields: Any) -> dict[str, Any]:
        response = stack.http.post(f"{prefix}/tokenize", json=fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    text = "Hello <|user|>wörld 🦊"
    assert ids_of(prompt=text, model=MODEL) == {"tokens": encode(text), "count": len(encode(text)), "max_model_len": 1000}
    assert ids_of(prompt=["a", "b c"])["count"] == [1, len(encode("b c"))]
    stack.post()
    assert ids_of(messages=HELLO, model=None, add_special_tokens=True)["tokens"] == list(stack.worker.requests[0].prompt_token_ids)
    assert (
        ids_of(messages=HELLO, chat_template_kwargs={"enable_thinking": False})["count"]
        == len(stack.worker.requests[0].prompt_token_ids) + 1
    )
    back = stack.http.post(f"{prefix}/detokenize", json={"tokens": encode(text)}).json()
    assert back == {"text": text, "prompt": text}
    assert stack.http.post(f"{prefix}/detokenize", json={"tokens": [encode("a"), encode("b")]}).json()["text"] == ["a", "b"]
    hidden = stack.http.post(f"{prefix}/detokenize", json={"tokens": encode(text), "skip_special_tokens": True}).json()
    assert hidden["text"] == "Hello wörld 🦊"
    assert stack.http.post(f"{prefix}/detokenize", json={"tokens": []}).json()["text"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokenize_refuses_by_name(stack: Stack, path: str, fields: dict[str, Any], param: str) -> None:
    """Bad input is 400 and named."""
    check_error(stack.http.post(path, json=fields), param)


def test_another_model_has_no_tokens_here(stack: Stack) -> None:
    """A model that is not served is 404."""
    assert stack.http.post("/tokenize", json={"prompt": "a", "model": "gpt-4"}).status_code == 404


def test_information(stack: Stack) -> None:
    """Model and server describe themselves, without secrets."""
    for path in ("/model_info", "/get_model_info"):
        info = stack.http.get(path).json()
        assert (info["model_path"], info["is_generation"], info["has_image_understanding"]) == (MODEL, True, False)
    for path in ("/server_info", "/get_server_info"):
        info = stack.http.get(path).json()
        assert (info["served_model_name"], info["context_length"], info["mode"]) == (MODEL, 1000, "fast")
        assert info["gateway"]["GLM53_REDIS_URL"] in ("", "***") or "redis" not in info["gateway"]["GLM53_REDIS_URL"]


def test_health_generate_probes_when_nothing_flows() -> None:
    """A silent server is asked for one token; one that has just given some is not; one that cannot is 503 or 500."""
    stack = Stack()
    try:
        assert stack.http.get("/health_generate").status_code == 200
        assert stack.worker.requests[0].sampling.max_tokens == 1
        assert stack.http.get("/health_generate").status_code == 200
        assert len(stack.worker.requests) == 1
        stack.services.traffic._last_token_at = float("-inf")
        stack.play(Fail(EngineFailed("broken")))
        assert stack.http.get("/health_generate").status_code == 500
    finally:
        stack.close()


def idempotent(stack: Stack, key: str, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": HELLO, **fields}
    return stack.http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": key})


def test_the_same_request_twice_runs_once(stack: Stack) -> None:
    """The second answer is the first one, marked; another key runs anew."""
    first, second = idempotent(stack, "k1"), idempotent(stack, "k1")
    assert first.json() == second.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert len(stack.worker.requests) == 1
    assert idempotent(stack, "k2").json()["id"] != first.json()["id"]


def test_the_same_key_for_another_request_is_refused(stack: Stack) -> None:
    """A different body under a used key is 409, and not retried."""
    idempotent(stack, "k3")
    response = idempotent(stack, "k3", temperature=0.5)
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
    assert response.json()["error"]["code"] == "idempotency_conflict"
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_requests_at_the_same_time_run_once(stack: Stack) -> None:
    """While the first one runs, its twins wait for its answer."""
    stack.play(Say("x"), Wait(0.3), Finish())
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: idempotent(stack, "k4").json()["id"], range(4)))
    assert len(set(answers)) == 1
    assert len(stack.worker.requests) == 1


def test_a_failure_is_not_kept(stack: Stack) -> None:
    """After an error the same request may try again, and so after a client that left."""
    stack.play(Fail(EngineFailed("broken")))
    assert idempotent(stack, "k5").status_code == 500
    stack.play(Say("x"), Finish())
    assert idempotent(stack, "k5").status_code == 200
    assert idempotent(stack, "k6", temperature=9).status_code == 400
    assert idempotent(stack, "k6").status_code == 200


def test_streams_are_not_kept(stack: Stack) -> None:
    """A stream runs every time; odd keys are refused."""
    for _ in range(2):
        assert b"[DONE]" in idempotent(stack, "k7", stream=True).content
    assert len(stack.worker.requests) == 2
    for odd in ("x" * 256, "a b", ""):
        check_error(idempotent(stack, odd), "Idempotency-Key")


def test_generates_text_is_the_whole_prompt(stack: Stack) -> None:
    """Control tokens in /generate's text are control tokens, as the text is the whole prompt."""
    generate(stack, text="<|user|>hi")
    assert list(stack.worker.requests[0].prompt_token_ids) == [IDS["<|user|>"], *encode("hi")]
    until(lambda: not stack.worker.live, "done")
    assert json.loads(stack.http.get("/stats").text)
