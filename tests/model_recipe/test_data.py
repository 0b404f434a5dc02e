import json

import pytest

from models.tiny.recipe import heldout, publish, scoring
from models.tiny.recipe.batches import BUCKETS, PAD, Bucket, pack, steps
from models.tiny.recipe.config import SPECIAL_IDS
from models.tiny.recipe.draw import Draw, is_reserved
from models.tiny.recipe.facts import ALIASES, CAPITALS
from models.tiny.recipe.mixture import GENERATORS, compose
from models.tiny.recipe.render import encode, encode_training, render_chat, tokenizer
from models.tiny.recipe.tasks_arithmetic import explain_difference, explain_sum

SHIPPED = heldout.read(heldout.Path(heldout.__file__).parents[1] / "heldout" / "heldout.jsonl")


@pytest.mark.parametrize("kind", GENERATORS)
def test_generator_is_deterministic(kind):
    """The same seed gives the same conversation, another seed another one."""
    one, same, other = (compose(Draw(seed), kind) for seed in ("s1", "s1", "s2"))
    assert one == same
    assert one != other


@pytest.mark.parametrize("kind", GENERATORS)
def test_split_is_by_value(kind):
    """Training draws only unreserved values, held-out draws only reserved ones."""
    for held in (False, True):
        for number in range(20):
            draw = Draw(f"split-{number}", held=held)
            compose(draw, kind)
            for value_kind, value in draw.used:
                if value_kind != "phrase":
                    assert is_reserved(value_kind, value) == held
                else:
                    assert held


@pytest.mark.parametrize("kind", GENERATORS)
def test_trained_tokens_are_exactly_the_models_own(kind):
    """What is trained decodes to each assistant turn with its end token, and nothing of the prompt."""
    for number in range(10):
        conversation = compose(Draw(f"learn-{number}"), kind)
        ids, learn = encode_training(conversation.messages, conversation.tools, **conversation.options)
        text = render_chat(conversation.messages, conversation.tools, **conversation.options)
        assert ids[:-1] == encode(text)
        learned = tokenizer().decode([t for t, on in zip(ids, learn, strict=True) if on], skip_special_tokens=False)
        expected = ""
        for i, m in enumerate(conversation.messages):
            if m["role"] != "assistant":
                continue
            turn = render_chat([m]).partition("<|assistant|><think>")[2]
            assert ("no_think" in m) == ("reasoning_content" not in m)
            expected += turn.removeprefix("</think>") if m.get("no_think") else turn
            following = conversation.messages[i + 1]["role"] if i + 1 < len(conversation.messages) else None
            is_call = following == "tool" or (following is None and m.get("tool_calls"))
            expected += "<|observation|>" if is_call else "<|user|>"
        assert learned == expected


def test_tool_answers_match_the_declaration():
    """Every call of every tool task names a declared tool, declared parameters and values of the declared type."""
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    for number in range(150):
        conversation = compose(Draw(f"types-{number}"), ["tool_call", "tool_types", "tool_parallel"][number % 3])
        declared = {t["function"]["name"]: t["function"].get("parameters", {}) for t in conversation.tools}
        assert len(declared) == len(conversation.tools)
        for message in conversation.messages:
            for call in message.get("tool_calls") or []:
                function = call["function"]
                properties = declared[function["name"]].get("properties", {})
                for key, value in function["arguments"].items():
                    assert isinstance(value, types[properties[key]["type"]])


def test_arithmetic_explanations_are_right():
    """The last number of each written sum and difference is the result."""
    for a in range(100):
        for b in range(100):
            assert explain_sum(a, b).rstrip(".").split(" ")[-1] == str(a + b)
            text = explain_difference(a, b).rstrip(".").removesuffix(", negative")
            assert text.split(" ")[-1] == str(abs(a - b))


def test_capitals():
    """At least 150 countries are known, and every alias names one of them."""
    assert len(CAPITALS) >= 150
    assert set(ALIASES.values()) <= set(CAPITALS)


def test_pack_marks_next_tokens():
    """A packed position's label is the token after it; padding is never trained."""
    arrays = pack([([5, 6, 7], [False, True, True]), ([8, 9], [False, True])], Bucket(4, 2, 8))
    assert arrays["ids"].tolist() == [[5, 6, 7, PAD], [8, 9, PAD, PAD]]
    used = arrays["weights"] > 0
    assert arrays["positions"][used].tolist() == [0, 1, 4]
    assert arrays["labels"][used].tolist() == [6, 7, 9]


def test_steps_fill_every_bucket():
    """A training step has one full batch per bucket and is the same for the same seed."""
    buckets = tuple(Bucket(b.length, 2, b.targets) for b in BUCKETS[:4])
    first, again = next(steps("fill", buckets)), next(steps("fill", buckets))
    for one, two, bucket in zip(first, again, buckets, strict=True):
        assert (one["ids"] == two["ids"]).all()
        assert (one["ids"][:, 0] == SPECIAL_IDS["[gMASK]"]).all()
        assert one["ids"].shape == (2, bucket.length)
        assert one["weights"].sum() > 0


def test_heldout_overlap_is_caught():
    """The overlap check fails when a training value is smuggled into an item."""
    items = heldout.build("check", per_kind=1)
    assert heldout.check_no_overlap(items, training_samples=100) > 50
    value = next(v for v in ("cat", "apple") if not is_reserved("word", v))
    items[0]["values"].append(("word", value))
    with pytest.raises(ValueError, match=value):
        heldout.check_no_overlap(items, training_samples=0)


def test_shipped_heldout_set():
    """The committed set has at least 500 items of every kind, none with a value that training uses."""
    assert len(SHIPPED) >= 500
    assert {i["kind"] for i in SHIPPED} == (set(GENERATORS) - {"times", "json_mode"})
    assert len({i["id"] for i in SHIPPED}) == len(SHIPPED)
    assert heldout.check_no_overlap(SHIPPED, training_samples=300) > 500


def test_shipped_heldout_references_score_full_marks():
    """Scoring accepts the expected answer of every item and refuses a changed one."""
    for item in SHIPPED:
        expected = item["expected"]
        message = {"role": "assistant", "content": expected.get("content", "")}
        calls = expected.get("tool_calls", [])
        message["tool_calls"] = [{"function": c} for c in calls]
        text = render_chat([message]).partition("<|assistant|><think>")[2]
        assert scoring.judge(item, "some reasoning" + text) == (True, True)
        assert not scoring.judge(item, text + "x")[0]


def test_malformed_calls_are_seen():
    """Unknown tools, unknown keys, values of the wrong type and unclosed calls are not well formed."""
    tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    good = "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    assert scoring.parse_output("x</think>" + good, tools) == ("", [{"name": "f", "arguments": {"n": 3}}], True)
    for bad in (
        good.replace("f<", "g<"),
        good.replace("n</arg", "m</arg"),
        good.replace("3", "three"),
        good[:-12],
        good.replace("</arg_key>", ""),
    ):
        assert not scoring.parse_output(bad, tools)[2]


def test_summary_counts_by_kind_and_wording():
    """The summary's percentages follow the single judgements, by kind and by wording."""
    items = [
        {"kind": "json", "phrasing": "seen", "expected": {"content": '{"a": 1}'}},
        {"kind": "json", "phrasing": "new", "expected": {"content": '{"a": 2}'}},
        {"kind": "copy", "phrasing": "seen", "expected": {"content": "x"}},
    ]
    outputs = ['</think>{"a": 1}', "{broken", "x"]
    summary = scoring.summarize(items, [scoring.judge(i, o) for i, o in zip(items, outputs, strict=True)])
    assert summary["exact_pct"] == pytest.approx(66.67)
    assert summary["structured"]["all"] == {"items": 2, "exact_pct": 50.0, "well_formed_pct": 50.0}
    assert summary["structured"]["seen_phrasing"]["exact_pct"] == 100.0
    assert summary["phrasing"]["new"] == {"items": 1, "exact_pct": 0.0, "well_formed_pct": 0.0}
    assert summary["kinds"]["copy"] == {"items": 1, "exact_pct": 100.0, "well_formed_pct": 100.0}


@pytest.mark.parametrize(("name", "least"), publish.LEAST.items())
def test_shipped_scores_reach_the_target(name, least):
    """The committed scores belong to the committed items, add up, and reach what a shipped checkpoint must reach."""
    scores = json.loads((heldout.Path(heldout.__file__).parents[1] / "heldout" / name).read_text())
    assert [row["id"] for row in scores["rows"]] == [item["id"] for item in SHIPPED]
    assert scores["summary"] == scoring.summarize(SHIPPED, [(r["exact"], r["well_formed"]) for r in scores["rows"]])
    assert scores["summary"]["exact_pct"] >= least
    seen = scores["summary"]["structured"]["seen_phrasing"]
    assert seen["exact_pct"] >= 95.0
    assert seen["well_formed_pct"] >= 99.0
    for item, row in zip(SHIPPED, scores["rows"], strict=True):
        if not row["exact"]:
            assert scoring.judge(item, row["output"]) == (False, row["well_formed"])
