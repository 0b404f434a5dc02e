"""/v1/responses, raw and through the official client."""

from __future__ import annotations

import json
import threading
from typing import Any, Final

import openai
import pytest

from services.common.errors import EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.fake_worker import Fail, Finish, Forever, Say, Script
from tests.gateway.language import IDS, NAMES, piece
from tests.gateway.stack import MODEL, Stack, until
from tests.gateway.test_validation import check_error

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
FULL = "hm</think>So <tool_call>f<arg_key>x</arg_key><arg_value>é🦊</arg_value></tool_call>"


def create(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = stack.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def events_of(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    response = stack.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", "stream": True, **fields})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(stack: Stack, index: int = -1) -> str:
    ids = stack.worker.requests[index].prompt_token_ids
    return b"".join(NAMES[number].encode() if number in NAMES else piece(number) for number in ids).decode()


def bare(value: Any) -> Any:
    """A value without the ids and times that differ between two answers."""
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if key not in ("id", "call_id", "created_at", "item_id")}
    return [bare(item) for item in value] if isinstance(value, list) else value


def test_a_whole_response(stack: Stack) -> None:
    """Reasoning, text and calls are items in their order; usage has OpenAI's names; the request is repeated."""
    stack.play(Say(FULL), Finish(cached=1))
    found = create(stack, tools=[TOOL], instructions="Be brief", max_output_tokens=50, metadata={"a": "b"}, reasoning={"effort": "low"})
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["error"], found["incomplete_details"]) == ("response", "completed", None, None)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    reasoning, message, call = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "So ", "annotations": [], "logprobs": []}]
    assert (call["name"], json.loads(call["arguments"]), call["call_id"][:5]) == ("f", {"x": "é🦊"}, "call_")
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    assert (found["instructions"], found["max_output_tokens"], found["metadata"]) == ("Be brief", 50, {"a": "b"})
    assert prompt_of(stack).startswith("[gMASK]<sop><|system|>Reasoning Effort: Low")
    assert "<|system|>Be brief<|user|>Hello" in prompt_of(stack)
    assert stack.sampling.max_tokens == 50


def test_the_stream_builds_the_same_response(stack: Stack) -> None:
    """Events in OpenAI's order: each item is added, filled and done, and the last event has the whole response."""
    stack.play(Say(FULL), Finish())
    whole = create(stack, tools=[TOOL])
    events = events_of(stack, tools=[TOOL])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert events[0]["response"]["status"] == "in_progress"
    assert bare(events[-1]["response"]) == bare(whole)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        joined = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert joined == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_input_items_become_turns(stack: Stack) -> None:
    """Messages, reasoning, calls and their outputs render as the conversation that they were."""
    items = [
        {"role": "developer", "content": "dev"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "calling"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": "1"}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    create(stack, input=items, tools=[TOOL])
    assert prompt_of(stack).endswith(
        "<|system|>dev<|user|>ab<|assistant|><think>think</think>calling"
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>f</tool_call>"
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
    )


def test_a_conversation_goes_on_from_a_stored_response(stack: Stack) -> None:
    """previous_response_id brings earlier input, reasoning and answer, not the earlier instructions."""
    stack.play(Say("hm</think>Hi Ada"), Finish())
    first = create(stack, input="I am Ada", instructions="old")
    stack.play(Say("</think>Ada"), Finish())
    second = create(stack, input="Who am I?", instructions="new", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert "old" not in prompt_of(stack)
    assert prompt_of(stack).endswith(
        "<|system|>new<|user|>I am Ada<|assistant|><think>hm</think>Hi Ada<|user|>Who am I?<|assistant|><think>"
    )
    streamed = events_of(stack, input="And?", previous_response_id=second["id"])
    assert prompt_of(stack).count("<|assistant|>") == 3
    assert create(stack, input="x", previous_response_id=streamed[-1]["response"]["id"])["status"] == "completed"


def test_stored_responses_can_be_read_and_deleted(stack: Stack) -> None:
    """GET gives the response and its input, DELETE forgets it, store false never keeps it."""
    found = create(stack, input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
    assert stack.http.get(f"/v1/responses/{found['id']}").json() == found
    items = stack.http.get(f"/v1/responses/{found['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["c", "b", "a"]
    assert stack.http.delete(f"/v1/responses/{found['id']}").json() == {"id": found["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        response = stack.http.request(method, f"/v1/responses/{found['id']}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    hidden = create(stack, store=False)
    assert stack.http.get(f"/v1/responses/{hidden['id']}").status_code == 404
    error = stack.http.post("/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": hidden["id"]}).json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")


def test_input_items_come_in_pages(stack: Stack) -> None:
    """`limit`, `order` and `after` are those of OpenAI's API; its client turns the pages by itself."""
    given = [{"role": "user", "content": str(number)} for number in range(5)]
    url = f"/v1/responses/{create(stack, input=given)['id']}/input_items"

    def page(**params: Any) -> tuple[list[str], bool]:
        found = stack.http.get(url, params=params).json()
        assert [found["first_id"], found["last_id"]] == (
            [found["data"][0]["id"], found["data"][-1]["id"]] if found["data"] else [None, None]
        )
        return [item["content"][0]["text"] for item in found["data"]], found["has_more"]

    assert page() == (["4", "3", "2", "1", "0"], False)
    assert page(order="asc", limit=2) == (["0", "1"], True)
    second = stack.http.get(url, params={"order": "asc", "limit": 2}).json()["last_id"]
    assert page(order="asc", limit=2, after=second) == (["2", "3"], True)
    assert page(order="desc", limit=1, after=second) == (["0"], False)
    name = url.split("/")[3]
    with stack.client() as client:
        assert [item.content[0].text for item in client.responses.input_items.list(name, limit=2, order="asc")] == list("01234")
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "item_9"}):
        check_error(stack.http.get(url, params=params), next(iter(params)))


def test_a_kept_response_is_not_streamed(stack: Stack) -> None:
    """Who asks for events must not get one object instead."""
    url = f"/v1/responses/{create(stack)['id']}"
    check_error(stack.http.get(url, params={"stream": "true"}), "stream")
    assert stack.http.get(url, params={"stream": "false"}).status_code == 200


def test_a_running_response_can_be_cancelled(stack: Stack) -> None:
    """Cancelling ends the job; the request that made it gets what there is. A complete one cannot be cancelled."""

    def cancelled(request: pb.GenerateRequest) -> Script:
        return Script((Say("hm</think>so far"), Forever()))

    stack.worker.script_for = cancelled
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(stack.http.post("/v1/responses", json={"model": MODEL, "input": "x"})))
    thread.start()
    until(lambda: stack.worker.live, "it runs")
    own = stack.worker.requests[-1].request_id
    response = stack.http.post(f"/v1/responses/resp_{own}/cancel")
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "cancelled"
    thread.join(10)
    assert not thread.is_alive()
    stack.worker.script_for = None
    done = create(stack)
    check_error(stack.http.post(f"/v1/responses/{done['id']}/cancel"), "response_id")
    assert stack.http.post("/v1/responses/resp_nothing/cancel").status_code == 404


def test_a_cut_answer_is_incomplete(stack: Stack) -> None:
    """The length limit gives status incomplete, whole and streamed."""
    stack.play(Say("hm</think>half"), Finish(pb.FINISH_REASON_LENGTH))
    found = create(stack)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["completed", "incomplete"]
    *events, last = events_of(stack)
    assert last["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]


def test_reasoning_that_is_the_answer(stack: Stack) -> None:
    """A model that never closes its thinking and stops has answered: the response has it as text."""
    stack.play(Say("Paris"), Finish())
    assert [(item["type"], item["content"][0]["text"]) for item in create(stack)["output"]] == [("message", "Paris")]


def test_an_error_in_mid_stream(stack: Stack) -> None:
    """The error is an event, then the failed response; no [DONE]."""
    stack.play(Say("hm</think>x"), Fail(EngineFailed("broken")))
    events = events_of(stack)
    assert (events[-2]["type"], events[-2]["message"]) == ("error", "broken")
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
    assert events[-1]["response"]["error"]["message"] == "broken"


def test_formats_and_choices_are_passed_on(stack: Stack) -> None:
    """text.format and tool_choice become grammars, as in chat."""
    stack.worker.supports_grammar = True
    stack.run(stack.services.watch.refresh())
    try:
        stack.play(Say("</think>{}"), Finish())
        create(stack, text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}})
        assert json.loads(stack.worker.requests[-1].grammar.json_schema) == {"type": "object"}
        create(stack, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
        assert stack.worker.requests[-1].grammar.after_token_id == IDS["</think>"]
    finally:
        stack.worker.supports_grammar = False
        stack.run(stack.services.watch.refresh())


LOGPROBS: Final = "message.output_text.logprobs"


def joined(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.parametrize("per_event", [1, 4])
@pytest.mark.parametrize(
    ("said", "tools"),
    [
        ("hm</think>Hi there", []),
        ("</think>é🦊 ünï\n\ncode", []),
        ("</think>  <b>", []),
        ("Paris", []),
        (FULL, [TOOL]),
        ("é</think>So <tool_call>g<arg_key>x</arg_key><arg_value>1</arg_value></tool_call> done", [TOOL]),
        ("</think>a <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>\n<tool_call>h", [TOOL]),
    ],
    ids=["plain", "cut characters", "held space", "unclosed reasoning", "call", "unknown tool", "unknown tool after a call"],
)
def test_the_text_is_what_its_log_probabilities_say(stack: Stack, said: str, tools: list[Any], per_event: int) -> None:
    """The entries of a text are its tokens and nobody else's, in every event that shows it; without `include` there are none."""
    stack.play(Say(said, per_event), Finish())
    fields: dict[str, Any] = {"tools": tools, "include": [LOGPROBS], "top_logprobs": 2}
    whole = create(stack, **fields)
    assert (whole["top_logprobs"], stack.sampling.logprobs) == (2, 2)
    parts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert parts
    for part in parts:
        assert joined(part["logprobs"]) == part["text"]
        for entry in part["logprobs"]:
            assert (entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]]) == (-0.5, [-0.5, -9999.0])
    events = events_of(stack, **fields)
    assert bare(events[-1]["response"]) == bare(whole)
    for done in (event for event in events if event["type"] == "response.output_text.done"):
        deltas = [event for event in events if event.get("item_id") == done["item_id"] and event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == done["logprobs"]
        assert joined(done["logprobs"]) == done["text"]
        (part_done,) = [event for event in events if event.get("item_id") == done["item_id"] and "part" in event and event["part"]["text"]]
        assert part_done["part"]["logprobs"] == done["logprobs"]
    assert all("logprobs" not in event for event in events if "reasoning" in event["type"])
    plain = create(stack, tools=tools, include=["reasoning.encrypted_content"], top_logprobs=0)
    assert [item["content"][0]["logprobs"] for item in plain["output"] if item["type"] == "message"] == [[] for _ in parts]
    assert stack.sampling.logprobs == -1


def test_the_official_client_reads_log_probabilities(stack: Stack) -> None:
    """As its types, whole and streamed; include alone brings the chosen tokens' own, and a stored response keeps them."""
    with stack.client() as client:
        stack.play(Say("hm</think>Hi é"), Finish())
        made = client.responses.create(model=MODEL, input="Hello", include=[LOGPROBS], top_logprobs=1)
        message = made.output[-1]
        assert message.type == "message"
        part = message.content[0]
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert [(len(entry.top_logprobs), entry.logprob) for entry in part.logprobs] == [(1, -0.5)] * len(part.logprobs)
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == made.output_text == "Hi é"
        assert client.responses.retrieve(made.id).output[-1] == message
        with client.responses.stream(model=MODEL, input="Hello", include=[LOGPROBS]) as streaming:
            events = list(streaming)
        deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [(entry.token, entry.logprob) for entry in deltas] == [(entry.token, entry.logprob) for entry in done.logprobs]
        assert [entry.token for entry in deltas] == [entry.token for entry in part.logprobs]
        assert all(entry.top_logprobs == [] for entry in deltas)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": ["message.output_text.logprob"]}, "include"),
        ({"include": LOGPROBS}, "include"),
        ({"include": [5]}, "include"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": -1}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "input_image"}]}, "input[0]"),
        ({"input": [{"type": ["x"]}]}, "input[0]"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "x"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "x"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"reasoning": {"effort": "x"}}, "reasoning"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"stream": "x"}, "stream"),
    ],
    ids=str,
)
def test_bad_fields_are_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """Every refusal is 400 in OpenAI's shape and names the client's own field."""
    check_error(stack.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields}), param)


def test_the_official_client(stack: Stack) -> None:
    """openai-python: create, stream, tools round trip, retrieve, delete, errors."""
    with stack.client() as client:
        stack.play(Say(FULL), Finish())
        made = client.responses.create(model=MODEL, input="Hello", tools=[{**TOOL, "strict": False}])  # type: ignore[list-item]
        assert made.output_text == "So "
        call = made.output[-1]
        assert call.type == "function_call"
        with client.responses.stream(model=MODEL, input="Hello", tools=[{**TOOL, "strict": False}]) as streaming:  # type: ignore[list-item]
            texts = [event.delta for event in streaming if event.type == "response.output_text.delta"]
            final = streaming.get_final_response()
        assert "".join(texts) == final.output_text == "So "
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        stack.play(Say("</think>42"), Finish())
        answer = client.responses.create(model=MODEL, input=[result], previous_response_id=made.id)  # type: ignore[list-item]
        assert answer.output_text == "42"
        assert "<tool_response>42</tool_response>" in prompt_of(stack)
        assert client.responses.retrieve(answer.id).output_text == "42"
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
