"""Lark terminals for strings of a schema that stand bare in the output, without quotes and escapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_DAY = r"(0[1-9]|[12][0-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"([0-9]{{4}}-((0[13578]|1[02])-({_DAY}|3[01])|(0[469]|11)-({_DAY}|30)|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = r"[0-9a-f]{1,4}"

# Narrower than the standards where those are wide: what is written under these is right for every reader.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T([0-9]{1,4}H)([0-9]{1,4}M([0-9]{1,4}S)?)?|T[0-9]{1,4}[MS])",
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,30}})?@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": rf"({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,3}}(:{_HEX}){{1,3}}|::{_HEX}|::",
    "uri": rf"[a-z][a-z0-9+.-]{{1,20}}://{_LABEL}(\.{_LABEL}){{0,4}}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,8}}"
    r"(\?[A-Za-z0-9._~=&-]{0,200})?(#[A-Za-z0-9._~-]{0,64})?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}

_ANYTHING = r"(?s:.*)"


def terminal(expressions: Sequence[str]) -> str:
    """A Lark expression for texts that all of the regular expressions match from end to end."""
    return " & ".join("/" + _slashes_escaped(expression) + "/" for expression in expressions)


def searching(pattern: str) -> str | None:
    """A regular expression for whole texts in which a JSON Schema `pattern` is found.

    Returns:
        None when an anchor stands where it cannot be taken away: inside a group or in the middle.
    """
    found = []
    for body in _split(pattern):
        if body is None:
            return None
        start = "" if body.startswith("^") else _ANYTHING
        end = "" if _ends_anchored(body) else _ANYTHING
        found.append(f"{start}(?:{body[not start : len(body) - (not end)]}){end}")
    return "|".join(f"(?:{expression})" for expression in found) if len(found) > 1 else found[0]


def _ends_anchored(body: str) -> bool:
    backslashes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    return body.endswith("$") and backslashes % 2 == 0


def _split(pattern: str) -> Iterable[str | None]:
    """The alternatives of a pattern, with classes as Rust's expressions want them; None for one with an anchor inside."""
    depth, in_class, start = 0, False, 0
    out: list[str] = []
    index = 0
    while index <= len(pattern):
        character = pattern[index : index + 1]
        if not character or (character == "|" and depth == 0 and not in_class):
            yield "".join(out)
            out, start = [], index + 1
        elif character == "\\":
            index += 1
            out.append(pattern[index - 1 : index + 1])
        elif in_class:
            in_class = character != "]"
            # Set operations of Rust's classes, plain characters in JSON Schema.
            out.append("\\" + character if character in "[&~" else character)
        else:
            in_class = character == "["
            depth += {"(": 1, ")": -1}.get(character, 0)
            last = pattern[index + 1 : index + 2] in ("", "|") and depth == 0
            if (character == "^" and index > start) or (character == "$" and not last):
                yield None
                return
            out.append(character)
        index += 1


def _slashes_escaped(expression: str) -> str:
    """The expression with slashes that end no regular expression between slashes, and without line breaks."""
    out, escaped = [], False
    for character in expression:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
