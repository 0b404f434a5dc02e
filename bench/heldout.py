"""The shipped model's held-out set through the HTTP API, greedy: what a client of the product gets.

    python -m bench.heldout [URL] [--limit N] [--out FILE]

Without a URL a server is started. Exact means: the content string, or each tool call's name and its arguments as JSON values; reasoning is
ignored.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report, server
from models.tiny.recipe.scoring import STRUCTURED
from tests.e2e.asking import ask, model_of

HELDOUT = report.ROOT / "models" / "tiny" / "heldout" / "heldout.jsonl"
OUT = report.ROOT / "docs" / "results" / "heldout_cpu.json"
STREAMS = 4


@dataclass(frozen=True)
class Score:
    """Percentages over the set."""

    exact_pct: float
    structured_exact_pct: float
    structured_well_formed_pct: float
    by_kind: dict[str, dict[str, float]]
    failures: list[dict[str, Any]]


def items() -> list[dict[str, Any]]:
    """Every held-out item."""
    return [json.loads(line) for line in HELDOUT.read_text().splitlines()]


def request_body(item: dict[str, Any], model: str) -> dict[str, Any]:
    """The request that a client would send for an item."""
    options = dict(item.get("options", {}))
    body: dict[str, Any] = {
        "model": model,
        "messages": [wire(message) for message in item["messages"]],
        "temperature": 0,
        "max_tokens": 512,
    }
    if item.get("tools"):
        body["tools"] = item["tools"]
    if "reasoning_effort" in options:
        body["reasoning_effort"] = options.pop("reasoning_effort")
    if not item["thinking"]:
        options["enable_thinking"] = False
    if options:
        body["chat_template_kwargs"] = options
    return body


def wire(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's API spells it: call arguments are a JSON string."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    spelled = []
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        spelled.append(
            {"id": call.get("id", f"call_{number}"), "type": "function", "function": {"name": function["name"], "arguments": text}}
        )
    return {**message, "tool_calls": spelled}


def judge(item: dict[str, Any], choice: dict[str, Any]) -> tuple[bool, bool]:
    """(exact, well formed) of one answer."""
    message, expected = choice["message"], item["expected"]
    content, well_formed, calls = message.get("content") or "", choice["finish_reason"] != "length", []
    for call in message.get("tool_calls") or []:
        try:
            calls.append({"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])})
        except ValueError:
            well_formed = False
    if item["kind"] == "json":
        try:
            json.loads(content)
        except ValueError:
            well_formed = False
    wanted = expected.get("tool_calls") or []
    if wanted:
        return calls == wanted and not content.strip(), well_formed and bool(calls) and "<tool_call>" not in content
    return content == expected["content"] and not calls, well_formed


def score_over_http(url: str, limit: int = 0) -> Score:
    """Asks every item with 4 requests at a time."""
    todo = items()[: limit or None]
    model = model_of(url)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        choices = list(pool.map(lambda item: ask(url, request_body(item, model))["choices"][0], todo))
    verdicts: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    failures = []
    for item, choice in zip(todo, choices, strict=True):
        verdict = judge(item, choice)
        verdicts[item["kind"]].append(verdict)
        if not verdict[0]:
            failures.append({"id": item["id"], "expected": item["expected"], "got": choice["message"]})
    every = [v for values in verdicts.values() for v in values]
    structured = [v for kind, values in verdicts.items() if kind in STRUCTURED for v in values]
    by_kind = {
        kind: {"items": len(v), "exact_pct": percent([e for e, _ in v]), "well_formed_pct": percent([w for _, w in v])}
        for kind, v in sorted(verdicts.items())
    }
    return Score(
        percent([e for e, _ in every]), percent([e for e, _ in structured]), percent([w for _, w in structured]), by_kind, failures
    )


def percent(values: list[bool]) -> float:
    """Share of true values."""
    return round(100 * sum(values) / max(1, len(values)), 2)


def main() -> None:
    """Scores and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    started = report.start("bench.heldout")
    if args.url:
        score = score_over_http(args.url, args.limit)
    else:
        with server.running() as own:
            score = score_over_http(own.url, args.limit)
    rows: list[dict[str, Any]] = [{"kind": kind, **values} for kind, values in score.by_kind.items()]
    rows += [{"failure": failure} for failure in score.failures]
    summary = {
        "heldout_exact_pct": score.exact_pct,
        "heldout_structured_exact_pct": score.structured_exact_pct,
        "heldout_structured_well_formed_pct": score.structured_well_formed_pct,
    }
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()
