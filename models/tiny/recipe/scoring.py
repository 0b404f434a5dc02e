"""Parse what the model wrote and compare it with what was expected; reasoning is ignored."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

Call = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def argument_kinds(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, str]]:
    """Tool name -> parameter -> JSON type, of the declared tools."""
    return {
        t["function"]["name"]: {
            key: spec.get("type", "string")
            for key, spec in t["function"].get("parameters", {}).get("properties", {}).items()
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


def summarize(items: list[dict[str, Any]], outputs: list[str]) -> dict[str, Any]:
    """Scores in percent: exact overall, per kind, and exact and well-formed of tool calls and JSON together."""
    by_kind: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for item, text in zip(items, outputs, strict=True):
        by_kind[item["kind"]].append(judge(item, text))

    def percent(values: list[bool]) -> float:
        return round(100.0 * sum(values) / max(1, len(values)), 2)

    every = [v for values in by_kind.values() for v in values]
    structured = [v for kind, values in by_kind.items() if kind in STRUCTURED for v in values]
    return {
        "items": len(items),
        "exact_pct": percent([e for e, _ in every]),
        "structured_exact_pct": percent([e for e, _ in structured]),
        "structured_well_formed_pct": percent([w for _, w in structured]),
        "kinds": {
            kind: {"items": len(v), "exact_pct": percent([e for e, _ in v]), "well_formed_pct": percent([w for _, w in v])}
            for kind, v in sorted(by_kind.items())
        },
    }


STRUCTURED = frozenset({"json", "tool_call", "tool_types", "tool_parallel"})
"""Kinds whose answer is a tool call or JSON."""
