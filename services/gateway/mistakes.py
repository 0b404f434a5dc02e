"""What is wrong with a body, in a client's words: pydantic's first error → the field at fault and what belongs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from services.common.errors import InvalidRequest
from services.gateway.errors import EmptyArray, InvalidType, MissingParameter

# Errors at or below these fields are reported under the path of the part at fault, the others under the field's own name.
_NESTED = ("tools", "messages")
_BRANCHES = ("bool", "int", "str", "NamedChoice", "NamedTool", "NativeSampling")
_NOT_ONE = "not_one"

# pydantic's names of errors of type → what the field must be.
_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
# Of its other errors → what the field must be, from the rule that it breaks.
_RULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "literal_error": lambda rule: str(rule["expected"]),
    "greater_than": lambda rule: f"more than {_plain(rule['gt'])}",
    "greater_than_equal": lambda rule: f"at least {_plain(rule['ge'])}",
    "less_than": lambda rule: f"less than {_plain(rule['lt'])}",
    "less_than_equal": lambda rule: f"at most {_plain(rule['le'])}",
    "finite_number": lambda _: "a finite number",
    "string_too_short": lambda rule: f"a string of at least {_counted(rule['min_length'], 'character')}",
    "string_too_long": lambda rule: f"a string of at most {_counted(rule['max_length'], 'character')}",
    "string_pattern_mismatch": lambda rule: f"a string that matches {rule['pattern']}",
    "too_short": lambda rule: f"a list of at least {_counted(rule['min_length'], 'entry')}",
    "too_long": lambda rule: f"a list of at most {_counted(rule['max_length'], 'entry')}",
}


def exactly_one(first: str, second: str, *, given: bool) -> PydanticCustomError:
    """For validators of whole bodies: of two fields both are there, or neither.

    Args:
        first: named as the one at fault.
        second: the other one.
        given: both are there.
    """
    words = f"{first} and {second} are both given; send one of them" if given else f"{first} is missing; send {first} or {second}"
    return PydanticCustomError(_NOT_ONE, "{words}", {"words": words, "param": first})


def mistake_of(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong, with its path."""
    errors = error.errors(include_url=False)
    # Of a field that may be one of several things, what the client came nearest to.
    branches = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    depth = max(len(each["loc"]) for each in branches)
    nearest = [each for each in branches if len(each["loc"]) == depth]
    first = nearest[0]
    if first["type"] == _NOT_ONE:
        rule = first["ctx"]
        return InvalidRequest(f"{rule['words']}.", param=rule["param"])
    location = [part for part in first["loc"] if not (isinstance(part, str) and _is_branch(part))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    param = path if location[0] in _NESTED else str(location[0])
    if first["type"] == "missing":
        return MissingParameter(f"{path} is missing.", param=param)
    wanted = _wanted(nearest)
    if not wanted:
        return InvalidRequest(f"{path} {first['msg'].removeprefix('Value error, ')[:300]}{_value(first['input'])}.", param=param)
    if first["type"] == "too_short" and first["input"] == []:
        return EmptyArray(f"{path} must have at least {wanted.removeprefix('a list of at least ')}.", param=param)
    kind = InvalidType if first["type"] in _KINDS else InvalidRequest
    # Where it is a list already, only its length can help.
    found = str(len(first["input"])) if first["type"] in ("too_short", "too_long") else shown(first["input"])
    return kind(f"{path} must be {wanted} (got {found}).", param=param)


def shown(value: Any) -> str:
    """A short, safe form of a refused value; the values of long texts stay out of errors."""
    if isinstance(value, (dict, list)):
        return {dict: "an object", list: "a list"}[type(value)]
    text = repr(value) if not isinstance(value, bool) and value is not None else {None: "null", True: "true", False: "false"}[value]
    return text if len(text) <= 60 else text[:57] + "…"


def _wanted(errors: Sequence[ErrorDetails]) -> str:
    """What a field must be: one thing, or one of several. Empty where a validator of ours has said it in its own words."""
    found = []
    for error in errors:
        name = error["type"]
        if name in _RULES:
            found.append(_RULES[name](error["ctx"]))
        elif name in _KINDS:
            found.append(_KINDS[name])
        elif error is errors[0]:
            return ""
    found = list(dict.fromkeys(found))
    if len(found) == 1:
        return found[0]
    return f"{', '.join(words.replace(' or ', ', ') for words in found[:-1])} or {found[-1]}"


def _value(value: Any) -> str:
    return "" if isinstance(value, dict | list) else f" (got {shown(value)})"


def _is_branch(part: str) -> bool:
    """True for what pydantic adds to a path to name the branch of a union."""
    return part in _BRANCHES or part.startswith(("list[", "dict[", "literal[", "function-", "constrained-"))


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _counted(count: int, word: str) -> str:
    if count == 1:
        return f"1 {word}"
    return f"{count} {'entries' if word == 'entry' else word + 's'}"
