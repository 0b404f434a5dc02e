"""What a grammar may ask of llguidance, which no limit of its own stops: it walks through rules by recursion, and a process whose stack
is used up is gone with every stream; and some expressions take it minutes."""

from __future__ import annotations

import collections
import contextlib
import decimal
import json
import math
import re
import urllib.parse
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from services.common.errors import InvalidRequest

T = TypeVar("T", bound=Hashable)
Kind = Literal["json_schema", "regex", "lark", "any_json_object"]

# Rules inside rules. Some thousands use up the eight megabytes of a thread's stack.
_MAX_DEPTH = 1000
# What is left of all multipleOf of a schema together without the factors 2 and 5: a million takes twelve seconds and a gigabyte.
_MAX_REMAINDERS = 20_000
# Objects of a schema, references followed: two thousand deep are too many.
_MAX_SCHEMA_DEPTH = 1200
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
_DECODER = json.JSONDecoder()


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
    if kind == "lark" and "::=" not in text and (depth := _depth(_references(text))) > _MAX_DEPTH:
        raise _too_much(f"its rules stand {depth} deep in each other, of {_MAX_DEPTH} at most")
    for schema in _schemas(kind, text):
        if (depth := _depth(_objects(schema))) > _MAX_SCHEMA_DEPTH:
            raise _too_much(f"its schemas stand {depth} deep in each other, of {_MAX_SCHEMA_DEPTH} at most")
        if _remainders(schema) > _MAX_REMAINDERS:
            raise _too_much(f"multipleOf is too uneven a number, or several are together: more than {_MAX_REMAINDERS} remainders to follow")


def _depth(inside: Mapping[T, Iterable[T]]) -> int:
    """How deep things stand in each other: the longest way down; those on cycles, and above them, count one each.

    Args:
        inside: each thing → what stands in it.
    """
    users: dict[T, list[T]] = {name: [] for name in inside}
    for name, found in inside.items():
        for other in found:
            users[other].append(name)
    depth = dict.fromkeys(inside, 1)
    missing = {name: len(list(found)) for name, found in inside.items()}
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


def _schemas(kind: Kind, text: str) -> Iterator[Any]:
    """The JSON schemas in a grammar; what is no JSON the library refuses itself."""
    places = [0] if kind == "json_schema" else [found.end() for found in re.finditer(r"%json ", text)] if kind == "lark" else []
    for place in places:
        with contextlib.suppress(ValueError, RecursionError):
            yield _DECODER.raw_decode(text, place)[0]


def _objects(document: Any) -> dict[int, list[int]]:
    """Each object of a document → the objects in it, and what it refers to."""
    inside: dict[int, list[int]] = {}
    waiting = [document]
    while waiting:
        outer = waiting.pop()
        if isinstance(outer, list):
            waiting += outer
        if not isinstance(outer, dict) or id(outer) in inside:
            continue
        parts = list(outer.values())
        if isinstance(outer.get("$ref"), str):
            parts.append(_target(document, outer["$ref"]))
        found: dict[int, dict[str, Any]] = {}
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict):
                found[id(part)] = part
        inside[id(outer)] = list(found)
        waiting += found.values()
    return inside


def _remainders(document: Any) -> int:
    """The least common multiple of all multipleOf, without the factors of ten."""
    found = 1
    waiting = [document]
    while waiting and found <= _MAX_REMAINDERS:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            number = value.get("multipleOf")
            if isinstance(number, int | float) and math.isfinite(number) and number > 0:
                found = math.lcm(found, _uneven(int("".join(map(str, decimal.Decimal(str(number)).as_tuple().digits)))))
    return found


def _uneven(number: int) -> int:
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return number or 1


def _target(document: Any, reference: str) -> Any:
    found = document
    for part in urllib.parse.unquote(reference.partition("#")[2]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        else:
            found = found[int(name)] if isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found) else None
    return found


def _expressions(kind: Kind, text: str) -> Iterator[str]:
    if kind == "regex":
        yield text
    elif kind == "lark":
        yield from _EXPRESSION.findall(_STRING.sub(" ", text))
    if kind in ("json_schema", "lark"):
        yield from _PATTERN.findall(text)


def _too_much(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The grammar cannot be used to constrain the output: {reason}", param="grammar")
