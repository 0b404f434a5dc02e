"""What a setting accepts, in words.

The words are made from a field's type and bounds, so that they cannot differ from what is checked; a field with a pattern says it itself
(`json_schema_extra={"accepts": "..."}`): a regular expression is no help.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# Values that are read only so that a start refuses them with a reason of their own: nobody is offered them.
NOT_OFFERED = frozenset({"nvme", "nvme-exact"})
MAX_SHOWN_CHARS = 80


def accepted(cls: type[BaseModel], name: str) -> str:
    """What the field `name` of a settings class accepts, e.g. "auto, off or a whole number from 1 to 8"."""
    for base in cls.__mro__:
        if issubclass(base, BaseModel) and (field := base.model_fields.get(name)) is not None:
            extra = field.json_schema_extra
            if isinstance(extra, dict) and "accepts" in extra:
                return str(extra["accepts"])
    field = cls.model_fields[name]
    return _either(list(_choices(field.annotation, field.metadata)))


def shown(value: object) -> str:
    """A refused value as a message has it: one line, and not too long."""
    text = str(value)
    text = text if text.isprintable() and text.strip() == text else repr(text)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…, {len(text)} characters"


def _choices(kind: Any, metadata: Iterable[Any]) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        yield from _choices(inner, [*metadata, *more])
    elif origin in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _choices(member, metadata)
    elif origin is Literal:
        yield from (str(value) for value in get_args(kind) if value not in NOT_OFFERED)
    elif kind is bool:
        yield from ("1", "0")
    elif kind in (int, float):
        yield _number("a whole number" if kind is int else "a number", list(_flat(metadata)))
    elif kind is not types.NoneType:
        yield _text(list(_flat(metadata)))


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _number(words: str, limits: list[Any]) -> str:
    least, above, most, step = (_limit(limits, name) for name in ("ge", "gt", "le", "multiple_of"))
    if least is not None and most is not None:
        words += f" from {least} to {most}"
    elif least is not None:
        words += f" of at least {least}"
    else:
        ends = [f"above {above}"] * (above is not None) + [f"at most {most}"] * (most is not None)
        words += f" {' and '.join(ends)}" if ends else ""
    return f"{words}, a multiple of {step}" if step is not None else words


def _text(limits: list[Any]) -> str:
    most = _limit(limits, "max_length")
    return f"text of at most {most} characters" if most is not None else "text"


def _limit(limits: list[Any], name: str) -> Any:
    return next((value for limit in limits if (value := getattr(limit, name, None)) is not None), None)


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
