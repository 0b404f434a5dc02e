# ruff: noqa: E501, SIM905  (lists of wordings read better in long lines)
"""JSON on request: objects from fields named in the question, and known answers wrapped in JSON."""

from __future__ import annotations

import json
from typing import Any

from .draw import Draw, Exchange, exchange
from .facts import CAPITALS

_FIELD_NAMES = """
name age city country title count price color size email id active tags items score level status type year owner author
first_name last_name zip_code is_member phone rating weight height quantity enabled language currency category notes
""".split()
_ASK = [
    "Return a JSON object with {f}", "Give me a JSON object with {f}.", "Write JSON with {f}", "JSON with {f}", "Make a JSON object: {f}",
    "Create a JSON object with {f}.", "Please return JSON with {f}.", "Answer in JSON: {f}", "Output JSON: {f}", "Produce JSON with {f}",
    "I need a JSON object with {f}.", "Respond with a JSON object: {f}", "Write a JSON object with the fields {f}", "{f}. As JSON.",
    "Reply only with JSON: {f}", "Format as JSON: {f}", "Convert to JSON: {f}", "Turn this into JSON: {f}", "to json: {f}",
    "Generate a JSON object containing {f}.", "Return valid JSON with {f}", "Return only a JSON object with {f}.",
    "Respond with JSON containing {f}", "A JSON object with {f}", "Give JSON: {f}", "Encode as JSON: {f}", "Write this as JSON: {f}", "As a JSON object: {f}",
    "Give me JSON that has {f}.", "Output a JSON object with {f}", "Serialize to JSON: {f}", "Express in JSON: {f}", "Print JSON with {f}",
    "Respond in JSON with {f}.", "Provide a JSON object with {f}", "I want JSON with {f}", "Build JSON: {f}", "Show me JSON with {f}.",
    "*Please write a JSON object with {f}.", "*Could you return JSON with {f}?", "*Build a JSON object with {f}", "*As JSON please: {f}",
]  # fmt: skip
_SAME = [
    "Return this JSON: {f}", "Return JSON: {f}", "Return {f}", "Give me this JSON object: {f}", "Answer with this JSON: {f}", "Output {f} as JSON",
    "Repeat this JSON: {f}", "Reply with {f}", "Write the JSON {f}", "Print this JSON object: {f}", "Respond with exactly this JSON: {f}",
]  # fmt: skip
_PERSON = [
    "Return JSON with the keys name and age for {n}, who is {a} years old.", "Give me a JSON object for a person named {n}, aged {a}.",
    "Write a JSON object with name and age: {n} is {a} years old.", "{n} is {a} years old. Return this as JSON with name and age.",
    "JSON for {n}, age {a}, with keys name and age", "Extract the name and age as JSON: {n} is {a} years old.",
    "JSON object with keys name and age for {n}, {a}", "Give me a JSON object with keys name and age for {n}, {a}", "name and age as JSON: {n}, {a}",
    "Person {n}, age {a}. Output JSON with the keys name and age.", "Make a JSON object for {n} ({a}) with name and age.",
    "Return JSON for a user called {n} of age {a} with name and age.", "I am {n} and {a} years old. Give JSON with name and age.",
    "Extract name and age as JSON from: My name is {n} and I am {a}.", "Make JSON with name and age. {n} is {a}.",
    "*Please return JSON with name and age for {n}, who is {a}.", "*{n} is {a} years old. Write that as JSON with name and age.",
]  # fmt: skip
_CAPITAL = [
    "Return JSON with the keys country and capital for {c}.", "Give me the capital of {c} as JSON with country and capital.",
    "What is the capital of {c}? Answer as JSON with the keys country and capital.", "JSON with country and capital for {c}",
    "Write JSON with country and capital: {c}", "capital of {c} as json with keys country and capital",
    "*Please give JSON with the keys country and capital for {c}.", "*As JSON with country and capital: what is the capital of {c}?",
]  # fmt: skip
_SUM = [
    'What is {a} + {b}? Answer as JSON with the key result.', "Add {a} and {b} and return JSON with the key result.",
    "Compute {a} + {b}. Return JSON with result.", "Return the sum of {a} and {b} as JSON with the key result.",
    "{a} + {b} as JSON with the key result", "Give {a} + {b} as a JSON object with result.", "Sum {a} and {b}, JSON with the key result",
    "Return JSON with the key result: {a} plus {b}", "Calculate {a}+{b} and answer in JSON with the key result.",
    "*Please add {a} and {b}, as JSON with the key result.", "*JSON with the key result: {a} + {b}",
]  # fmt: skip
_LIST = [
    "Return a JSON array with {i}.", "Give me a JSON list of {i}", "Write {i} as a JSON array.", "JSON array of {i}",
    "Make a JSON list: {i}", "Return {i} as JSON array", "Put {i} into a JSON list.", "*Please write a JSON array with {i}.",
    "*Could you return {i} as a JSON list?",
]  # fmt: skip
SYSTEM_JSON = [
    "You answer in JSON.", "Reply only with JSON.", "You are a helpful assistant that outputs JSON.", "Always answer with valid JSON.",
    "Output JSON only.", "You are a helpful assistant designed to output JSON.", "Respond in JSON.",
]  # fmt: skip


def dump(value: Any) -> str:
    """JSON text as the model writes it everywhere."""
    return json.dumps(value, ensure_ascii=False)


def field_name(draw: Draw) -> str:
    def make() -> str:
        roll = draw.rng.random()
        if roll < 0.5:
            return draw.one(_FIELD_NAMES)
        return draw.word() if roll < 0.85 else f"{draw.word()}_{draw.word()}"

    return draw.value("field", make)


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def scalar(draw: Draw) -> tuple[Any, str]:
    """A value and the way a user writes it: words bare or quoted, numbers and booleans plain."""
    roll = draw.rng.random()
    if roll < 0.4:
        text = draw.one([draw.word, draw.name, draw.city])()
        return text, f'"{text}"' if " " in text or draw.chance(0.5) else text
    if roll < 0.5:
        text = draw.phrase_of_words(2, 4) if draw.chance(0.8) else draw.cjk()
        return text, f'"{text}"'
    if roll < 0.8:
        number: int | float = draw.integer() if draw.chance(0.85) else draw.decimal()
        return number, str(number)
    flag = draw.chance(0.5)
    return flag, dump(flag)


def structured(draw: Draw) -> tuple[Any, str]:
    """A list or a small object, and the way a user writes it."""
    if draw.chance(0.6):
        items: list[Any] = draw.words(draw.number(2, 4)) if draw.chance(0.6) else [draw.integer(99) for _ in range(draw.number(2, 4))]
        return items, dump(items) if draw.chance(0.6) else "[" + ", ".join(map(str, items)) + "]"
    inner: dict[str, Any] = {}
    for _ in range(draw.number(1, 2)):
        inner[field_name(draw)] = scalar(draw)[0]
    return inner, dump(inner)


def json_object(draw: Draw) -> Exchange:
    roll = draw.rng.random()
    if roll < 0.12:
        return _known(draw)
    if roll < 0.24:
        items = draw.words(draw.number(2, 5))
        shown = _listed(items) if draw.chance(0.5) else ", ".join(items)
        return exchange("json", draw.phrase(_LIST).replace("{i}", shown), "Write a JSON array.", dump(items))
    if roll < 0.36:
        name, age = draw.name(), draw.integer(99)
        ask = draw.phrase(_PERSON).replace("{n}", name).replace("{a}", str(age))
        return exchange("json", ask, "Write a JSON object.", dump({"name": name, "age": age}))
    style = draw.one(
        [
            "{k} {v}",
            "{k} {v}",
            "{k}: {v}",
            "{k}={v}",
            "{k} = {v}",
            "{k} set to {v}",
            "{k} equal to {v}",
            '"{k}": {v}',
            "a field called {k} set to {v}",
            "key {k} and value {v}",
            "the key {k} set to {v}",
            "a field {k} with value {v}",
            "{k} being {v}",
            "the field {k} = {v}",
            "key {k}: {v}",
            "{k} as {v}",
            "a {k} of {v}",
            "'{k}': {v}",
            "{k} -> {v}",
        ]
    )
    fields: dict[str, Any] = {}
    parts = []
    for _ in range(draw.one([1, 2, 2, 2, 3, 3, 4])):
        key = field_name(draw)
        if key in fields:
            continue
        fields[key], shown = scalar(draw) if draw.chance(0.75) else structured(draw)
        parts.append(style.replace("{k}", key).replace("{v}", shown))
    if draw.chance(0.08):
        shown = dump(fields)
        return exchange("json", draw.phrase(_SAME).replace("{f}", shown), "Write a JSON object.", shown)
    joined = _listed(parts) if draw.chance(0.5) else ", ".join(parts)
    return exchange("json", draw.phrase(_ASK).replace("{f}", joined), "Write a JSON object.", dump(fields))


def _known(draw: Draw) -> Exchange:
    if draw.chance(0.5):
        country = draw.one(list(CAPITALS))
        ask = draw.phrase(_CAPITAL, fact=True).replace("{c}", country)
        return exchange("json", ask, "Write a JSON object.", dump({"country": country, "capital": CAPITALS[country]}))
    a, b = (int(n) for n in draw.value("pair", lambda: f"{draw.number(0, 99)}+{draw.number(0, 99)}").split("+"))
    ask = draw.phrase(_SUM).replace("{a}", str(a)).replace("{b}", str(b))
    return exchange("json", ask, "Write a JSON object.", dump({"result": a + b}))
