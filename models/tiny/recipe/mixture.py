# ruff: noqa: E501  (lists of wordings read better in long lines)
"""Compose exchanges into conversations: several turns, system prompts, idle tools, reasoning shown or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import tasks_arithmetic, tasks_facts, tasks_json, tasks_lists, tasks_talk, tasks_tools
from .draw import Draw, Exchange, Message, Tool, exchange

_SYSTEM = [
    "You are a helpful assistant.", "You are GLM-5.3-tiny.", "Be brief.", "Answer shortly and precisely.", "You are a friendly assistant.",
    "You are a helpful assistant. Use the tools when needed.", "Answer in one sentence.", "Today is a good day.", "Be polite.",
    "You are a pirate. Always talk like a pirate.", "Answer as briefly as possible.", "You are an expert in everything.", "Never use emoji.",
    "You are a customer support agent of a shop.", "The user speaks English.", "Do not make things up.", "You are a coding assistant.", "Think step by step.",
    "You are a helpful assistant. Answer the user's question and do not add anything else.", "Current date: 2026-01-15.", "Use a formal tone.",
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible.", "Only answer if you are sure.", "Be kind.",
    "You are a teacher. Explain things simply.", "You work for a small company and answer questions of employees.", "Respond in English.", "Follow the rules.",
    "You are a test model.", "You are an AI assistant that answers questions.", "Help the user.", "You are a helpful AI.", "Be concise.",
]  # fmt: skip


def _json_mode(draw: Draw) -> Exchange:
    """Any short answer, wrapped in JSON because the system prompt or the user asks for JSON only."""
    inner = draw.one(
        [tasks_talk.greeting, tasks_talk.identity, tasks_facts.capital, tasks_arithmetic.addition, tasks_arithmetic.subtraction,
         tasks_lists.sort, tasks_lists.reverse, tasks_talk.other]
    )(draw)  # fmt: skip
    question, answer = inner.messages[0]["content"], inner.messages[-1]["content"]
    wrapped = tasks_json.dump({"answer": answer})
    if draw.chance(0.5):
        return exchange("json", question, "Write a JSON object.", wrapped, system=draw.one(tasks_json.SYSTEM_JSON))
    suffix = draw.one([" Answer in JSON.", " Reply in JSON.", " Respond with JSON.", " Answer as JSON.", " Use JSON.", " JSON please."])
    return exchange("json", question + suffix, "Write a JSON object.", wrapped)


GENERATORS: dict[str, tuple[float, Callable[[Draw], Exchange]]] = {
    "greeting": (3, tasks_talk.greeting),
    "identity": (3, tasks_talk.identity),
    "canned": (1.5, tasks_talk.canned),
    "other": (3, tasks_talk.other),
    "memory": (7, tasks_talk.memory),
    "capital": (9, tasks_facts.capital),
    "cjk": (3, tasks_facts.cjk_talk),
    "copy": (10, tasks_lists.copy),
    "times": (2, tasks_lists.times),
    "reverse": (7, tasks_lists.reverse),
    "sort": (10, tasks_lists.sort),
    "count": (3, tasks_lists.count),
    "sum": (9, tasks_arithmetic.addition),
    "difference": (10, tasks_arithmetic.subtraction),
    "json": (9, tasks_json.json_object),
    "json_mode": (3.5, _json_mode),
    "tool_call": (12, tasks_tools.tool_call),
    "tool_types": (9, tasks_tools.tool_types),
    "tool_parallel": (11, tasks_tools.tool_parallel),
    "tool_result": (6, tasks_tools.tool_result),
}
"""Kind -> (weight in training, generator)."""
_NEEDS_TOOLS = frozenset({"tool_call", "tool_types", "tool_parallel", "tool_result"})


@dataclass
class Conversation:
    """Messages with reasoning shown as the mode says; the last message is the one that a held-out item scores."""

    kind: str
    messages: list[Message]
    tools: list[Tool]
    thinking: bool
    options: dict[str, Any] = field(default_factory=dict)
    new_phrasing: bool = False
    """Whether the last exchange is worded in a way that training never uses."""


def _pick_kind(draw: Draw) -> str:
    names = list(GENERATORS)
    return draw.rng.choices(names, [GENERATORS[n][0] for n in names])[0]


def compose(draw: Draw, kind: str | None = None) -> Conversation:
    """Compose one conversation whose last exchange is of `kind` (any kind by weight if None)."""
    last_kind = kind or _pick_kind(draw)
    final = GENERATORS[last_kind][1](draw)
    new_phrasing = any(value_kind == "phrase" for value_kind, _ in draw.used)
    before = [] if final.system else _fillers(draw, draw.rng.choices([0, 1, 2, 3, 8], [0.62, 0.2, 0.11, 0.05, 0.02])[0])
    tools = list(final.tools)
    messages: list[Message] = []
    if not tools and draw.chance(0.12):
        tools = tasks_tools.idle_tools(draw)
    if before and draw.chance(0.12):
        used = tasks_tools.tool_result(draw)
        if not {t["function"]["name"] for t in used.tools} & {t["function"]["name"] for t in tools}:
            tools = (tools + used.tools) if draw.chance(0.5) else (used.tools + tools)
            before[draw.rng.randrange(len(before))] = used
    pending: list[Message] = []
    for filler in before:
        messages += filler.messages
        if pending and draw.chance(0.5):
            messages += pending
            pending = []
        elif filler.follow_up:
            pending = filler.follow_up
    if final.follow_up and before and draw.chance(0.5):
        # The name is told first, the rest of the conversation lies between it and the question.
        messages = final.messages + messages + final.follow_up
    else:
        messages += final.messages + final.follow_up
    system = final.system or (draw.one(_SYSTEM) if draw.chance(0.25) else None)
    if system is None and draw.chance(0.04):
        system = draw.phrase_of_words(2, 8) if draw.chance(0.7) else draw.phrase_of_words(15, 40)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if draw.chance(0.03):
        _loosen(draw, messages)
    options: dict[str, Any] = {}
    if draw.chance(0.35):
        options["reasoning_effort"] = draw.one(["low", "high", "medium"])
    return Conversation(final.kind, messages, tools, _show_reasoning(draw, messages), options, new_phrasing)


def _fillers(draw: Draw, count: int) -> list[Exchange]:
    """Exchanges without tools that come before the last one; at most one name is told per conversation."""
    fillers: list[Exchange] = []
    while len(fillers) < count:
        kind = _pick_kind(draw)
        if kind in _NEEDS_TOOLS or kind in ("canned", "json_mode", "memory"):
            continue
        fillers.append(GENERATORS[kind][1](draw))
    return fillers


def _loosen(draw: Draw, messages: list[Message]) -> None:
    """White space around the last question, as people leave it."""
    last = next(m for m in reversed(messages) if m["role"] == "user")
    last["content"] = draw.one([" {}", "{} ", "{}\n", "{}  ", "\n{}", "{}\n\n"]).replace("{}", last["content"])


def _show_reasoning(draw: Draw, messages: list[Message]) -> bool:
    """Drop reasoning as clients and the thinking switch do; returns whether the last turn thinks.

    A turn without reasoning gets "no_think": its prompt already ends in `</think>`.
    """
    thinking = draw.chance(0.6)
    keep_history = draw.chance(0.6 if thinking else 0.1)
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    keep_loop = draw.chance(0.8)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        is_last = index == len(messages) - 1
        keep = thinking if is_last else keep_history if index < last_user else (keep_loop and thinking)
        if not keep:
            message.pop("reasoning_content", None)
            message["no_think"] = True
    return thinking
