"""What a grammar may ask of llguidance, which no limit of its own stops: it walks through rules by recursion, and a process whose stack
is used up is gone with every stream; and some expressions take it minutes."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Literal

from services.common.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "lark", "any_json_object"]

# Rules inside rules. Some thousands use up the eight megabytes of a thread's stack.
_MAX_DEPTH = 1000
# GBNF is converted first, in quadratic time: a thousand rules take a second.
_MAX_GBNF_RULES = 1000
_MAX_BLANK_LINES = 20
# Repetitions without a bound in one expression: a thousand take it half a second, ten thousand half a minute.
_MAX_REPETITIONS = 1000
# Classes of characters cost 5 ms each where case is ignored.
_MAX_CASELESS_CLASSES = 500

_CASELESS = re.compile(r"\(\?[a-zA-Z]{0,9}i|/[imslux]{0,5}i[imslux]{0,5}(?=[\s|)*+?]|$)")
_CLASS = re.compile(r"\[|\\[pP]")
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_EXPRESSION = re.compile(r"/((?:\\.|[^/\\\n])*)/")
_PATTERN = re.compile(r'"pattern": ?"((?:\\.|[^"\\])*)"')
_RULE = re.compile(r"[!?]{0,2}([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]{0,100}\])?\s{0,9}:")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_grammar(kind: Kind, text: str) -> None:
    """Refuses what would take the worker down or its threads for minutes.

    Raises:
        InvalidRequest: says what there is too much of.
    """
    if _CASELESS.search(text) and (count := len(_CLASS.findall(text))) > _MAX_CASELESS_CLASSES:
        raise _too_much(f"it ignores case and has {count} classes of characters, of {_MAX_CASELESS_CLASSES} at most")
    most = max((sum(map(expression.count, "*+")) for expression in _expressions(kind, text)), default=0)
    if most > _MAX_REPETITIONS:
        raise _too_much(f"an expression in it has {most} repetitions, of {_MAX_REPETITIONS} at most")
    if kind == "lark" and "::=" in text and (count := text.count("::=")) > _MAX_GBNF_RULES:
        raise _too_much(f"it has {count} rules, of {_MAX_GBNF_RULES} at most")
    if kind == "lark" and "::=" not in text and (depth := depth_of(text)) > _MAX_DEPTH:
        raise _too_much(f"its rules stand {depth} deep in each other, of {_MAX_DEPTH} at most")


def depth_of(text: str) -> int:
    """How deep rules of a Lark grammar may stand in each other: the longest way down; those on cycles, and above them, count one each."""
    inside = _references(text)
    users: dict[str, list[str]] = {name: [] for name in inside}
    for name, found in inside.items():
        for other in found:
            users[other].append(name)
    depth = dict.fromkeys(inside, 1)
    missing = {name: len(found) for name, found in inside.items()}
    ready = collections.deque(name for name, count in missing.items() if not count)
    left = len(inside)
    while ready:
        name = ready.popleft()
        left -= 1
        for user in users[name]:
            depth[user] = max(depth[user], depth[name] + 1)
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return left + max((depth[name] for name, count in missing.items() if not count), default=0)


def without_gaps(text: str) -> str:
    """A text with few blank lines in a row, which the converter would look through once for each of them, with the interpreter stopped."""
    lines, blank = [], 0
    for line in text.split("\n"):
        blank = 0 if line.strip() else blank + 1
        if blank <= _MAX_BLANK_LINES:
            lines.append("" if blank else line)
    return "\n".join(lines)


def _references(text: str) -> dict[str, set[str]]:
    """Each rule's name → names of the rules in it."""
    plain = _EXPRESSION.sub(" ", _STRING.sub(" ", text))
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    for line in plain.split("\n"):
        stripped = line.strip()
        rule = _RULE.match(stripped)
        if rule is not None:
            current = bodies.setdefault(rule[1], [])
            stripped = stripped[rule.end() :]
        current.append(stripped)
    return {name: {word for part in parts for word in _NAME.findall(part) if word in bodies} for name, parts in bodies.items()}


def _expressions(kind: Kind, text: str) -> Iterator[str]:
    if kind == "regex":
        yield text
    elif kind == "lark":
        yield from _EXPRESSION.findall(_STRING.sub(" ", text))
    if kind in ("json_schema", "lark"):
        yield from _PATTERN.findall(text)


def _too_much(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The grammar cannot be used to constrain the output: {reason}", param="grammar")
