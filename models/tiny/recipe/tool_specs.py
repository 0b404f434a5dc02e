# ruff: noqa: SIM905  (lists of wordings read better in long lines)
"""Random tool declarations: names, parameters and descriptions that training never repeats in the held-out set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import words
from .draw import Draw, Tool
from .tasks_json import dump

_PARAM_NAMES = """
name title text label message query topic city country date time day month year hour minutes seconds count limit amount
price size width height depth color level mode format language speed volume user user_id item item_id code key path file
folder url email phone address owner category priority status start end from_date to_date page offset rate weight height
distance temperature enabled verbose recursive force public urgent confirm include_details tags items ids names values
options filters metadata settings location target source currency unit room device channel group note reason score index
""".split()
_NOUN_EXTRA = "user order file report invoice ticket event task note record item account payment message photo song playlist".split()
_VERB_EXTRA = "get set create delete update fetch list search find send check start stop open close remove move rename".split()


@dataclass
class Param:
    """One declared parameter. `kind` is string, integer, number, boolean, array or object."""

    name: str
    kind: str
    description: str = ""
    enum: list[str] = field(default_factory=list)
    item_kind: str = "string"
    fields: list[str] = field(default_factory=list)
    required: bool = True

    def schema(self) -> dict[str, Any]:
        spec: dict[str, Any] = {"type": self.kind}
        if self.description:
            spec["description"] = self.description
        if self.enum:
            spec["enum"] = self.enum
        if self.kind == "array":
            spec["items"] = {"type": self.item_kind}
        if self.kind == "object" and self.fields:
            spec["properties"] = {name: {"type": "string"} for name in self.fields}
        return spec


@dataclass
class Spec:
    """A tool: its name, the words a user would say for it, and its parameters."""

    name: str
    action: str
    params: list[Param]
    description: str = ""

    def tool(self, draw: Draw) -> Tool:
        """The OpenAI declaration; required and description keys vary as clients' do."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        parameters: dict[str, Any] = {"type": "object", "properties": {p.name: p.schema() for p in self.params}}
        if draw.chance(0.8):
            parameters["required"] = [p.name for p in self.params if p.required]
        if draw.chance(0.1):
            parameters["additionalProperties"] = False
        if self.params or draw.chance(0.8):
            function["parameters"] = parameters
        return {"type": "function", "function": function}


def tool_name(draw: Draw, parts: list[str]) -> str:
    """Write the parts in one of the usual spellings; the result lies on the source's side of the split."""
    style = draw.one(["snake", "snake", "snake", "camel", "kebab", "joined"])
    if style == "snake":
        return "_".join(parts)
    if style == "camel":
        return parts[0] + "".join(p.capitalize() for p in parts[1:])
    return "-".join(parts) if style == "kebab" else "".join(parts)


def _verb(draw: Draw) -> str:
    return draw.one(words.VERBS + _VERB_EXTRA * 3)


def _noun(draw: Draw) -> str:
    roll = draw.rng.random()
    return draw.one(words.NOUNS) if roll < 0.5 else draw.one(_NOUN_EXTRA) if roll < 0.8 else draw.nonsense()


def param_name(draw: Draw) -> str:
    def make() -> str:
        roll = draw.rng.random()
        if roll < 0.55:
            return draw.one(_PARAM_NAMES)
        if roll < 0.75:
            return _noun(draw)
        return draw.nonsense() if roll < 0.82 else f"{_noun(draw)}_{draw.one(['id', 'name', 'count', 'type', 'date', 'size'])}"

    return draw.value("param", make)


def random_param(draw: Draw, kinds: list[str]) -> Param:
    param = Param(param_name(draw), draw.one(kinds))
    spoken = param.name.replace("_", " ")
    if draw.chance(0.6):
        param.description = draw.one(
            [f"The {spoken}", f"the {spoken}", f"{spoken.capitalize()} to use", f"The {spoken} of the {_noun(draw)}", spoken]
        )
    if param.kind == "string" and draw.chance(0.15):
        param.enum = draw.words(draw.number(2, 4))
    if param.kind == "array":
        param.item_kind = draw.one(["string", "string", "integer", "number"])
    if param.kind == "object" and draw.chance(0.7):
        param.fields = [draw.word() for _ in range(draw.number(1, 2))]
    param.required = draw.chance(0.75)
    return param


def random_spec(draw: Draw, kinds: list[str] | None = None, num_params: int | None = None) -> Spec:
    """A tool with a name not on the other side of the split and 0 to 4 parameters of the given kinds."""
    kinds = kinds or ["string", "string", "string", "integer", "number", "boolean", "array", "object"]
    chosen: list[str] = []

    def make() -> str:
        roll = draw.rng.random()
        if roll < 0.65:
            chosen[:] = [_verb(draw), _noun(draw)]
            return tool_name(draw, chosen)
        if roll < 0.8:
            chosen[:] = [_verb(draw), draw.one(words.ADJECTIVES), _noun(draw)]
            return tool_name(draw, chosen)
        if roll < 0.9:
            chosen[:] = [_noun(draw), _verb(draw)]
            return tool_name(draw, chosen)
        chosen[:] = [draw.nonsense()]
        return chosen[0] if draw.chance(0.5) else tool_name(draw, [chosen[0], draw.nonsense()])

    name = draw.value("tool", make)
    action = " ".join(chosen) if len(chosen) == 1 else f"{chosen[0]} the {' '.join(chosen[1:])}"
    description = ""
    if draw.chance(0.85):
        noun_phrase = " ".join(chosen[1:]) or chosen[0]
        description = draw.one(
            [
                f"{chosen[0].capitalize()} the {noun_phrase}", f"{chosen[0].capitalize()} a {noun_phrase}.",
                f"Use this to {chosen[0]} the {noun_phrase}.", f"{chosen[0].capitalize()}s the {noun_phrase} of a user",
                f"Tool to {chosen[0]} {noun_phrase}", f"{chosen[0]} {noun_phrase}",
                f"{chosen[0].capitalize()} the {noun_phrase}. Call this whenever the user wants to {chosen[0]} a {noun_phrase}.",
            ]
        )  # fmt: skip
    count = draw.one([0, 1, 1, 2, 2, 3, 3, 4]) if num_params is None else num_params
    params: list[Param] = []
    while len(params) < count:
        param = random_param(draw, kinds)
        if param.name not in [p.name for p in params]:
            params.append(param)
    return Spec(name, action, params, description)


def argument(draw: Draw, param: Param) -> tuple[Any, str]:
    """A value for a parameter and the way the user writes it."""
    if param.enum:
        value = draw.one(param.enum)
        return value, value
    if param.kind == "string":
        roll = draw.rng.random()
        if roll < 0.65:
            text = draw.one([draw.word, draw.name, draw.city, lambda: f"{draw.word()}{draw.integer(99)}"])()
            return text, f'"{text}"' if " " in text or draw.chance(0.4) else text
        if roll < 0.75:
            text = draw.one([f"2025-{draw.number(1, 12):02}-{draw.number(1, 28):02}", f"{draw.number(0, 23):02}:{draw.number(0, 59):02}",
                             f"{draw.word()}@{draw.word()}.com", f"/{draw.word()}/{draw.word()}.txt"])  # fmt: skip
            return text, text
        text = draw.phrase_of_words(2, 5) if roll < 0.95 else draw.one([draw.cjk, draw.emoji])()
        return text, f'"{text}"'
    if param.kind == "integer":
        whole = draw.integer() * (-1 if draw.chance(0.05) else 1)
        return whole, str(whole)
    if param.kind == "number":
        number: int | float = draw.integer() if draw.chance(0.5) else draw.decimal()
        return number, str(number)
    if param.kind == "boolean":
        flag = draw.chance(0.5)
        return flag, draw.one(["true", "true", "yes", "on"] if flag else ["false", "false", "no", "off"])
    if param.kind == "array":
        return _array(draw, param)
    names = param.fields or [draw.word()]
    inner: Any = {name: draw.one([draw.word, draw.name])() for name in names}
    return inner, dump(inner)


def _array(draw: Draw, param: Param) -> tuple[Any, str]:
    count = draw.number(1, 4)
    if param.item_kind == "string":
        items: list[Any] = [draw.one([draw.word, draw.name])() for _ in range(count)]
    elif param.item_kind == "integer":
        items = [draw.integer(99) for _ in range(count)]
    else:
        items = [draw.decimal() if draw.chance(0.5) else draw.integer(99) for _ in range(count)]
    return items, dump(items) if draw.chance(0.6) else "[" + ", ".join(map(str, items)) + "]"
