"""What a request asks of the form of its answer → one grammar for the worker.

Four dialects say the same: OpenAI's response_format, vLLM's structured_outputs and its older guided_*, and tool_choice. A request may
use one of them. Grammars begin after ``</think>``: reasoning is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.beside import beside
from services.gateway.formats import ResponseFormat
from services.gateway.json_text import read_json
from services.gateway.lark import ANY_TEXT, json_rule, literal
from services.gateway.prompt import PromptTail
from services.gateway.schema_check import check_schema
from services.gateway.schema_support import check_support, for_grammar
from services.gateway.schemas import SamplingFields
from services.gateway.tool_call import Tag
from services.gateway.tool_grammar import DeclaredTool, ToolGrammar
from services.gateway.worker_client import Language

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# What a schema may say beside `properties: {}` without having any.
_SAYS_NOTHING = frozenset({"type", "properties", "required", "title", "description", "$schema"})
_BARE_SLASH = re.compile(r"(?<!\\)/")

# Larger ones take the worker seconds, if they can be followed at all.
_MAX_GRAMMAR_CHARS = 2_000_000

Kind = Literal["json_schema", "regex", "lark", "any_json_object"]


@dataclass(frozen=True)
class Wanted:
    """A form that was asked for.

    Attributes:
        kind: as the worker names it.
        text: schema, expression or grammar.
        param: the request's field.
        part: of a grammar, how it reads as a part of a larger one; empty when it cannot be one.
    """

    kind: Kind
    text: str
    param: str
    part: str = ""


@dataclass(frozen=True)
class Constrained:
    """A grammar for the worker, and the request's field that it comes from."""

    grammar: pb.Grammar
    param: str


@dataclass(frozen=True)
class ToolDemand:
    """What tool_choice asks for.

    Attributes:
        tools: those that may be called.
        forced: the answer must be a call.
        several: parallel calls are allowed.
        only: the one tool that must be called.
    """

    tools: Sequence[dict[str, Any]]
    forced: bool
    several: bool
    only: str | None = None

    @property
    def callable_tools(self) -> list[DeclaredTool]:
        """The tools that a call may name, and whether it must keep to their schemas."""
        return [
            DeclaredTool(
                tool["function"]["name"],
                _parameters(tool["function"].get("parameters")),
                f"tools[{index}].function.parameters",
                must_hold=self.forced or bool(tool["function"].get("strict")),
            )
            for index, tool in enumerate(self.tools)
            if self.only in (None, tool["function"]["name"])
        ]

    @property
    def strict(self) -> bool:
        """True when a tool asks that its calls keep to its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)


def _parameters(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema that a forced call is held to: a tool that declares no parameters takes none, whatever a model would make up."""
    if schema is None or (schema.get("properties") == {} and schema.keys() <= _SAYS_NOTHING):
        return _NO_PARAMETERS
    return schema


async def constraint_for(
    body: SamplingFields, demand: ToolDemand | None, *, tail: PromptTail, language: Language, supported: bool
) -> Constrained | None:
    """The grammar that a request needs, made beside the event loop; None when its answer is free.

    Raises:
        InvalidRequest: two fields ask for different forms, or a form is not complete.
        UnsupportedParameter: the worker cannot constrain; free text must not pretend to be checked.
    """
    response_format = getattr(body, "response_format", None)
    free = (response_format is None or response_format.type == "text") and body.structured_outputs is None
    free = free and all(getattr(body, name) in (None, False) for name in _ALIASES)
    if free and (demand is None or not (demand.forced or demand.strict)):
        return None
    return await beside(_constraint, body, demand, tail, language, supported)


def _constraint(
    body: SamplingFields, demand: ToolDemand | None, tail: PromptTail, language: Language, supported: bool
) -> Constrained | None:
    wanted = _wanted(body, language.tokenizer.control_ids)
    found = _with_tools(wanted, demand, language) if demand is not None and demand.tools else wanted
    if found is None:
        return None
    if not supported:
        if found.param == "tools":
            return None
        raise UnsupportedParameter(f"{found.param} is not supported by this worker: it cannot constrain its output.", param=found.param)
    if len(found.text) > _MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{found.param} makes a grammar of {len(found.text)} characters; this server takes {_MAX_GRAMMAR_CHARS}.", param=found.param
        )
    found = spelled_out(found, language.tokenizer.control_ids)
    grammar = pb.Grammar()
    if found.kind == "any_json_object":
        grammar.any_json_object = True
    else:
        setattr(grammar, found.kind, found.text)
    if tail is not PromptTail.CONTENT:
        ids = language.tokenizer.control_ids
        grammar.after_token_id = ids.get(Tag.THINK_END.value, 0)
        if demand is not None and demand.tools:
            grammar.not_before_token_ids.append(ids[Tag.CALL.value])
    return Constrained(grammar, found.param)


def spelled_out(wanted: Wanted, ids: Mapping[str, int]) -> Wanted:
    """The same form; where it holds the text of a control token, that text is written letter by letter.

    What must come next is otherwise encoded by the tokenizer, which makes the control token of it.
    """
    if not any(text in wanted.text for text in ids):
        return wanted
    head = '%llguidance {"no_forcing": true}\n'
    if wanted.kind == "json_schema":
        text = f"start: {json_rule(json.loads(wanted.text))}\n"
    elif wanted.kind == "regex":
        text = f"start: FORM\nFORM: {_regex(wanted.text)}\n"
    else:
        text = wanted.text.removeprefix("%llguidance {}\n")
        head = "" if "%llguidance" in text or "::=" in text else head
    return Wanted("lark", head + text, wanted.param)


def _with_tools(wanted: Wanted | None, demand: ToolDemand, language: Language) -> Wanted | None:
    """The form of an answer that may or must be a call."""
    if not demand.forced and wanted is None and not demand.strict:
        return None
    grammar = ToolGrammar(demand.callable_tools, language.tokenizer.control_ids, language.template.call_style)
    if demand.forced:
        return Wanted("lark", grammar.calls(several=demand.several), "tool_choice")
    if wanted is None:
        return Wanted("lark", grammar.text_with_calls(several=demand.several), "tools")
    if wanted.part:
        return Wanted("lark", grammar.calls_or(wanted.part, "", several=demand.several), wanted.param)
    if wanted.kind == "lark":
        raise InvalidRequest(f"{wanted.param}: a grammar and tools cannot be combined; send tool_choice none.", param=wanted.param)
    if wanted.kind == "regex":
        body, rules = "FORM", f"FORM: {_regex(wanted.text)}"
    else:
        schema = json.loads(wanted.text) if wanted.kind == "json_schema" else {"type": "object"}
        body, rules = "form", f"form: {json_rule(schema)}"
    return Wanted("lark", grammar.calls_or(body, rules, several=demand.several), wanted.param)


def _wanted(body: SamplingFields, ids: Mapping[str, int]) -> Wanted | None:
    """The one form that the request's fields ask for.

    Raises:
        InvalidRequest: more than one does.
    """
    found: list[Wanted] = []
    response_format = getattr(body, "response_format", None)
    if response_format is not None and response_format.type != "text":
        found.append(_response_format(response_format, ids))
    outputs = body.structured_outputs
    if outputs is not None:
        found.append(_form(outputs.given[0], getattr(outputs, _ATTRIBUTES[outputs.given[0]]), "structured_outputs"))
    for param, name in _ALIASES.items():
        value = getattr(body, param)
        if value is not None and value is not False:
            found.append(_form(name, value, param))
    if len(found) > 1:
        raise InvalidRequest(f"{found[0].param} and {found[1].param} both ask for a form of the answer; send one.", param=found[1].param)
    return found[0] if found else None


# Fields of vLLM, SGLang and llama-server → the field of structured_outputs that means the same.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_ATTRIBUTES = {"json": "json_", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}


def _form(name: str, value: Any, param: str) -> Wanted:
    if name == "json_object":
        return Wanted("any_json_object", "", param)
    if name == "json":
        path = "structured_outputs.json" if param == "structured_outputs" else param
        return Wanted("json_schema", _schema_text(value, param, path), param)
    if name == "regex":
        return Wanted("regex", value, param)
    if name == "choice":
        part = " | ".join(map(literal, value))
        return Wanted("lark", f"%llguidance {{}}\nstart: {part}\n", param, part)
    return Wanted("lark", value, param)


def _schema_text(schema: dict[str, Any] | str, param: str, path: str) -> str:
    if isinstance(schema, str):
        schema = read_json(schema, path, param)
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{path}: the JSON schema must be an object.", param=param)
    kept = for_grammar(_checked(schema, param, path))
    text = json.dumps(kept)
    # A oneOf is held as an anyOf.
    return json.dumps(kept | {"x-guidance": {"coerce_one_of": True}}) if '"oneOf"' in text else text


def _checked(schema: dict[str, Any], param: str, path: str) -> dict[str, Any]:
    check_schema(schema, path, param)
    check_support(schema, path, param, "leave it out, and check it yourself")
    return schema


def _response_format(wanted: ResponseFormat, ids: Mapping[str, int]) -> Wanted:
    param = "response_format"
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        return Wanted("json_schema", _schema_text(wanted.json_schema.schema_, param, f"{param}.json_schema.schema"), param)
    if wanted.type == "json_object":
        if wanted.schema_ is None:
            return Wanted("any_json_object", "", param)
        return Wanted("json_schema", _schema_text(wanted.schema_, param, f"{param}.schema"), param)
    return Wanted("lark", _structural_tag(wanted, ids), param)


def _structural_tag(wanted: ResponseFormat, ids: Mapping[str, int]) -> str:
    """Free text in which whatever begins with a trigger must go on as one of its structures."""
    rules = [f"ANY_TEXT: {ANY_TEXT}"]
    names = []
    for number, trigger in enumerate(dict.fromkeys(wanted.triggers or [])):
        forms = []
        for index, structure in enumerate(wanted.structures or []):
            if structure.begin.startswith(trigger):
                schema = json_rule(_checked(structure.schema_, "response_format", f"response_format.structures[{index}].schema"))
                forms.append(" ".join(filter(None, [literal(structure.begin.removeprefix(trigger)), schema, _written(structure.end, ids)])))
        if not forms:
            continue
        if trigger in ids:
            # A control token ends the text before it by itself.
            rules.append(f"tag_{number}: ANY_TEXT <[{ids[trigger]}]> ({' | '.join(forms)})")
        else:
            rules += [f"begin_{number}[lazy]: ANY_TEXT {literal(trigger)}", f"tag_{number}: begin_{number} ({' | '.join(forms)})"]
        names.append(f"tag_{number}")
    return "\n".join(["%llguidance {}", f"start: ({' | '.join(names)})* ANY_TEXT", *rules]) + "\n"


def _written(text: str, ids: Mapping[str, int]) -> str:
    """A text, or the control token that it spells."""
    return f"<[{ids[text]}]>" if text in ids else literal(text)


def _regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/" + _BARE_SLASH.sub(r"\\/", pattern) + "/"
