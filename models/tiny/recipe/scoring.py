"""Parse what the model wrote and compare it with what was expected; reasoning is ignored."""

from __future__ import annotations

import json
import re
from typing import Any

Call = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def argument_kinds(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, str]]:
    """Tool name -> parameter -> JSON type, of the declared tools."""
    return {
        t["function"]["name"]: {
            key: spec.get("type", "string") for key, spec in t["function"].get("parameters", {}).get("properties", {}).items()
        }
        for t in tools or []
    }


def parse_output(text: str, tools: list[dict[str, Any]] | None) -> tuple[str, list[Call], bool]:
    """Split generated text (decoded with tags, without the end token) into (content, calls, well_formed).

    The text starts inside the reasoning or after it; everything up to the last `</think>` is reasoning. A call is well
    formed when its tool is declared, its keys are declared and its values parse as their types.
    """
    text = text.rpartition("</think>")[2]
    kinds = argument_kinds(tools)
    calls: list[Call] = []
    good = True
    for body in _CALL.findall(text):
        name = body.partition("<arg_key>")[0]
        arguments: dict[str, Any] = {}
        rest = _ARGUMENT.sub("", body[len(name) :])
        good = good and not rest and name in kinds
        for key, raw in _ARGUMENT.findall(body):
            kind = kinds.get(name, {}).get(key)
            good = good and kind is not None
            if kind in (None, "string"):
                arguments[key] = raw
                continue
            try:
                arguments[key] = json.loads(raw)
            except json.JSONDecodeError:
                arguments[key] = raw
                good = False
        calls.append({"name": name, "arguments": arguments})
    content = _CALL.sub("", text).strip()
    return content, calls, good and "<tool_call>" not in content and "</tool_call>" not in content


def judge(item: dict[str, Any], text: str) -> tuple[bool, bool]:
    """(exact, well formed) of generated text for a held-out item."""
    content, calls, good = parse_output(text, item.get("tools"))
    expected = item["expected"]
    wanted = expected.get("tool_calls") or []
    if item["kind"] == "json":
        try:
            json.loads(content)
        except json.JSONDecodeError:
            good = False
    if wanted:
        return content == "" and calls == wanted, good and bool(calls)
    return content == expected["content"] and not calls, good


Judgement = tuple[bool, bool]
"""(exact, well formed) of one item."""


def _percent(values: list[bool]) -> float:
    return round(100.0 * sum(values) / max(1, len(values)), 2)


def _part(judgements: list[Judgement]) -> dict[str, Any]:
    return {
        "items": len(judgements),
        "exact_pct": _percent([exact for exact, _ in judgements]),
        "well_formed_pct": _percent([good for _, good in judgements]),
    }


def summarize(items: list[dict[str, Any]], judgements: list[Judgement]) -> dict[str, Any]:
    """Scores in percent: exact overall, by kind, and of tool calls and JSON ("structured") by phrasing.

    Every value is new to the model. An item's phrasing is "new" when the wording of its last question is too.
    """
    pairs = list(zip(items, judgements, strict=True))
    kinds = sorted({item["kind"] for item in items})
    structured = [(item, j) for item, j in pairs if item["kind"] in STRUCTURED]
    return {
        "items": len(items),
        "exact_pct": _percent([exact for exact, _ in judgements]),
        "structured": {
            "all": _part([j for _, j in structured]),
            **{f"{p}_phrasing": _part([j for i, j in structured if i["phrasing"] == p]) for p in ("seen", "new")},
        },
        "phrasing": {p: _part([j for i, j in pairs if i["phrasing"] == p]) for p in ("seen", "new")},
        "kinds": {kind: _part([j for i, j in pairs if i["kind"] == kind]) for kind in kinds},
    }


STRUCTURED = frozenset({"json", "tool_call", "tool_types", "tool_parallel"})
"""Kinds whose answer is a tool call or JSON."""
