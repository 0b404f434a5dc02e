# ruff: noqa: E501  (lists of wordings read better in long lines)
"""Tool calls: choose the right tool, fill its arguments, call twice, answer from results."""

from __future__ import annotations

from typing import Any

from .draw import Draw, Exchange, Message, Tool, answer_turn, user_turn
from .tasks_json import dump, field_name, scalar, structured
from .tool_families import FAMILIES, build_spec, natural_request, pair_request
from .tool_specs import Spec, argument, random_spec

Call = tuple[str, dict[str, Any]]

_BY_NAME = [
    "Call {n} with {p}", "Call {n} with {p}.", "Use {n} with {p}.", "Please call {n} with {p}", "Run {n} with {p}.", "{n} {p}", "Use {n}: {p}",
    "Use the {n} tool with {p}.", "Call the function {n} with {p}.", "Execute {n} with {p}", "Invoke {n} with {p}.", "Please use {n} with {p}.",
    "Trigger {n} with {p}", "Start {n} with {p}.", "I want to call {n} with {p}.", "Do {n} with {p}", "Let {n} run with {p}.", "Make a call to {n}: {p}",
    "Use the function {n} with {p}.", "Apply {n} with {p}", "Tool {n}, {p}", "{n}: {p}", "{n}({p})", "Perform {n} with {p}.", "Call {n} using {p}", "Call {n} where {p}",
    "*Could you call {n} with {p}?", "*Please run the {n} tool with {p}.", "*Call the tool {n} with {p}.",
]  # fmt: skip
_BY_ACTION = [
    "Please {n} with {p}.", "{n} with {p}", "I want to {n} with {p}.", "Can you {n} with {p}?", "I need to {n}: {p}", "Please {n}, {p}.", "{n}: {p}",
    "Let us {n} with {p}.", "It is time to {n} with {p}", "Help me {n} with {p}.", "{n} using {p}", "{n} where {p}", "{n}. Use {p}.", "You should {n} with {p}",
    "We have to {n}: {p}", "{n} now, {p}", "My wish: {n} with {p}.", "Someone has to {n} with {p}.", "Will you {n} with {p}?", "Can we {n} with {p}?", "{n} ({p})",
    "*Could you {n} with {p}?", "*I would like to {n} with {p}.",
]  # fmt: skip
_NO_PARAMS = [
    "Call {n}.",
    "Use {n}",
    "Please call {n}",
    "Run {n}.",
    "{n}",
    "Call the {n} tool.",
    "*Could you call {n}?",
    "*Please run {n}.",
]
_NO_PARAMS_ACTION = ["Please {n}.", "{n}", "Can you {n}?", "I want to {n}.", "*Could you {n}?"]
_RESULT = "Here is the result: "
_RESULTS = "Here are the results: "


def _calls_turn(calls: list[Call]) -> Message:
    names = " and ".join(dict.fromkeys(name for name, _ in calls))
    turn = answer_turn(f"I call {names}." if len(calls) == 1 else f"I call {names}, {len(calls)} calls.", "")
    turn["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return turn


def _spoken_params(draw: Draw, spec: Spec) -> tuple[str, dict[str, Any]]:
    """Mention every required and some optional parameters, in one style."""
    style = draw.one(
        ["{k} {v}", "{k} {v}", "{k} {v}", "{k}={v}", "{k}: {v}", "{k} = {v}", "{k} set to {v}", "{v} as {k}", "the {k} {v}", "{k} is {v}"]
    )
    spaced = draw.chance(0.3)
    parts, arguments = [], {}
    params = [p for p in spec.params if p.required or draw.chance(0.5)] or spec.params[:1]
    if draw.chance(0.3):
        draw.rng.shuffle(params)
    for param in params:
        value, shown = argument(draw, param)
        arguments[param.name] = value
        key = param.name.replace("_", " ") if spaced else param.name
        parts.append(style.replace("{k}", key).replace("{v}", shown))
    if len(parts) > 1 and draw.chance(0.6):
        return ", ".join(parts[:-1]) + " and " + parts[-1], arguments
    return ", ".join(parts), arguments


def _spec_request(draw: Draw, spec: Spec) -> tuple[str, dict[str, Any]]:
    by_action = draw.chance(0.45)
    named = spec.action if by_action else spec.name
    if not spec.params:
        text = draw.phrase(_NO_PARAMS_ACTION if by_action else _NO_PARAMS).replace("{n}", named)
        return text[0].upper() + text[1:] if by_action else text, {}
    spoken, arguments = _spoken_params(draw, spec)
    text = draw.phrase(_BY_ACTION if by_action else _BY_NAME).replace("{n}", named).replace("{p}", spoken)
    return text[0].upper() + text[1:] if by_action else text, arguments


def _declared(draw: Draw, needed: list[Tool], family: str | None, most: int = 3) -> list[Tool]:
    """The needed tools among 0 to `most` others, shuffled."""
    tools = list(needed)
    names = {t["function"]["name"] for t in tools}
    for _ in range(draw.one([0, 1, 1, 2, 2, 3][: most + 3])):
        if draw.chance(0.5):
            groups = [key for key in FAMILIES if family is None or key.split("_")[0] != family.split("_")[0]]
            if family in FAMILIES and draw.chance(0.5):
                # Tools that take the same kind of value under another name: the parameter must come from the right tool.
                kinds = {kind for _, kind in FAMILIES[family].slots.values()}
                groups = [key for key in groups if kinds & {kind for _, kind in FAMILIES[key].slots.values()}] or groups
            spec = build_spec(draw, FAMILIES[draw.one(groups)])[0] if family is not None else random_spec(draw)
        else:
            spec = random_spec(draw)
        if spec.name not in names:
            names.add(spec.name)
            tools.append(spec.tool(draw))
    draw.rng.shuffle(tools)
    return tools


def _result_text(draw: Draw) -> tuple[str, str]:
    """What a tool answers and how the model reports it."""
    roll = draw.rng.random()
    if roll < 0.3:
        text = draw.one(
            [
                draw.phrase_of_words(1, 4),
                f"{draw.integer(99)} C",
                str(draw.integer()),
                draw.city(),
                "ok",
                f"{draw.integer(40)} degrees and {draw.word()}",
            ]
        )
        return text, text
    fields: dict[str, Any] = {}
    for _ in range(draw.number(1, 3)):
        key = (
            draw.one(["temperature", "condition", "status", "result", "time", "price", "total", "id", "wind"])
            if draw.chance(0.5)
            else field_name(draw)
        )
        fields[key] = scalar(draw)[0] if draw.chance(0.9) else structured(draw)[0]
    return dump(fields), ", ".join(f"{key} {value if isinstance(value, str) else dump(value)}" for key, value in fields.items())


def _with_results(draw: Draw, messages: list[Message]) -> list[Message]:
    """Append one result per call and the answer made from them."""
    calls = messages[-1]["tool_calls"]
    results = [_result_text(draw) for _ in calls]
    for index, (call, (raw, _)) in enumerate(zip(calls, results, strict=True)):
        call["id"] = f"call_{index}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": raw})
    head = _RESULT if len(results) == 1 else _RESULTS
    messages.append(answer_turn("I report the result.", head + "; ".join(shown for _, shown in results)))
    return messages


def _one_call(draw: Draw, kinds: list[str] | None) -> tuple[str, list[Call], list[Tool]]:
    if kinds is None and draw.chance(0.55):
        key = draw.one(list(FAMILIES)) if draw.chance(0.75) else draw.one(["weather", "weather_unit"])
        spec, slots = build_spec(draw, FAMILIES[key])
        text, arguments = natural_request(draw, FAMILIES[key], slots)
        return text, [(spec.name, arguments)], _declared(draw, [spec.tool(draw)], key)
    spec = random_spec(draw, kinds, None if kinds is None else draw.number(1, 3))
    text, arguments = _spec_request(draw, spec)
    return text, [(spec.name, arguments)], _declared(draw, [spec.tool(draw)], None)


def request_without_tools(draw: Draw) -> str:
    """A request that would need a tool; the caller declares none that fits."""
    if draw.chance(0.6):
        family = FAMILIES[draw.one([k for k in FAMILIES if k not in ("math", "multiply")])]
        return natural_request(draw, family, build_spec(draw, family)[1])[0]
    return _spec_request(draw, random_spec(draw))[0]


def tool_call(draw: Draw) -> Exchange:
    if draw.chance(0.12):
        return _called_again(draw)
    text, calls, tools = _one_call(draw, None)
    return Exchange("tool_call", [user_turn(text), _calls_turn(calls)], tools)


def _called_again(draw: Draw) -> Exchange:
    """A second request for a tool that has already answered once."""
    key = draw.one(list(FAMILIES))
    spec, slots = build_spec(draw, FAMILIES[key])
    text, arguments = natural_request(draw, FAMILIES[key], slots)
    messages = _with_results(draw, [user_turn(text), _calls_turn([(spec.name, arguments)])])
    text, arguments = natural_request(draw, FAMILIES[key], slots)
    messages += [user_turn(text), _calls_turn([(spec.name, arguments)])]
    return Exchange("tool_call", messages, _declared(draw, [spec.tool(draw)], key, most=2))


def tool_types(draw: Draw) -> Exchange:
    """Calls whose arguments are numbers, booleans, arrays and objects."""
    text, calls, tools = _one_call(draw, ["integer", "number", "boolean", "array", "array", "object", "object", "string"])
    return Exchange("tool_types", [user_turn(text), _calls_turn(calls)], tools)


def tool_parallel(draw: Draw) -> Exchange:
    """One question that needs two calls: one tool twice, or two tools."""
    if draw.chance(0.5):
        key = draw.one([k for k, f in FAMILIES.items() if f.pair_asks]) if draw.chance(0.5) else "weather"
        spec, slots = build_spec(draw, FAMILIES[key])
        text, arguments = pair_request(draw, FAMILIES[key], slots)
        messages = [user_turn(text), _calls_turn([(spec.name, a) for a in arguments])]
        tools = _declared(draw, [spec.tool(draw)], key, most=2)
    else:
        if draw.chance(0.5):
            keys = draw.rng.sample([k for k in FAMILIES if "_" not in k and k not in ("math", "user")], 2)
            parts = []
            for key in keys:
                spec, slots = build_spec(draw, FAMILIES[key])
                ask, call_arguments = natural_request(draw, FAMILIES[key], slots)
                parts.append((ask.rstrip(".?!"), spec, call_arguments))
        else:
            specs = [random_spec(draw, ["string", "string", "integer", "number", "boolean"], draw.number(1, 2)) for _ in range(2)]
            parts = []
            for spec in specs:
                ask, call_arguments = _spec_request(draw, spec)
                parts.append((ask.rstrip(".?!"), spec, call_arguments))
        joint = draw.one([" and ", ". And ", ". Also: ", ", and then ", ". Then: "])
        text = (
            parts[0][0]
            + joint
            + (parts[1][0][0].lower() + parts[1][0][1:] if joint in (" and ", ", and then ") and parts[1][1].action else parts[1][0])
        )
        messages = [user_turn(text), _calls_turn([(spec.name, call_arguments) for _, spec, call_arguments in parts])]
        tools = _declared(draw, [spec.tool(draw) for _, spec, _ in parts], "none", most=1)
    if draw.chance(0.3):
        return Exchange("tool_result", _with_results(draw, messages), tools)
    return Exchange("tool_parallel", messages, tools)


def tool_result(draw: Draw) -> Exchange:
    text, calls, tools = _one_call(draw, None)
    return Exchange("tool_result", _with_results(draw, [user_turn(text), _calls_turn(calls)]), tools)


def idle_tools(draw: Draw) -> list[Tool]:
    """Tools that are declared but not needed by the question."""
    return _declared(draw, [random_spec(draw).tool(draw)], "none" if draw.chance(0.5) else None, most=2)
