"""Lark grammars of the model's own call format, with the arguments that the tools' schemas allow.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>

Control tokens stand in a grammar as ``<[id]>``: text can never match them. Arguments come in the order of the schema, required ones
always, others perhaps. A string stands bare, within its lengths, pattern and format; every other value is JSON of its schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import UnsupportedParameter
from services.gateway.lark import ANY_TEXT, literal
from services.gateway.schema_parts import Document
from services.gateway.schema_support import check_support
from services.gateway.tool_call import Tag
from services.gateway.tool_objects import ObjectWay, object_ways
from services.gateway.value_rules import ValueRules

CALL_ADVICE = "change it or leave it out, or let calls be free (tool_choice auto, no strict)"


@dataclass(frozen=True)
class DeclaredTool:
    """A tool that may be called.

    Attributes:
        name: as the model writes it.
        parameters: its JSON schema, a valid one of an object.
        path: where the schema stands in the request.
        must_hold: the request is refused when calls cannot be held to the schema; otherwise their arguments are free then.
    """

    name: str
    parameters: dict[str, Any]
    path: str
    must_hold: bool = True


@dataclass(frozen=True)
class CallStyle:
    """White space that a model family writes inside a call.

    Attributes:
        after_name: between the name and the first key.
        after_key: between key and value.
        after_value: after each value.
    """

    after_name: str = ""
    after_key: str = ""
    after_value: str = ""


class ToolGrammar:
    """Rules for calls of the declared tools.

    Args:
        tools: those that may be called.
        ids: control token → id.
        style: the model's white space.

    Raises:
        UnsupportedParameter: a schema asks for what cannot be enforced; the place is named.
    """

    def __init__(self, tools: Sequence[DeclaredTool], ids: Mapping[str, int], style: CallStyle) -> None:
        self._ids = ids
        self._style = style
        self._rules: list[str] = [f"ANY_TEXT: {ANY_TEXT}"]
        self._values = ValueRules(self._rules)
        names = [self._tool(number, tool) for number, tool in enumerate(tools)]
        self._rules.append(f"call: {self._tag(Tag.CALL)} ({' | '.join(names)}) {self._tag(Tag.CALL_END)}")

    def calls(self, *, several: bool) -> str:
        """One call, or one and more."""
        return self._document("call+" if several else "call")

    def calls_or(self, body: str, rules: str, *, several: bool) -> str:
        """Calls, or something else.

        Args:
            body: what may stand instead of calls.
            rules: rules that `body` needs.
            several: more than one call is allowed.
        """
        return self._document(f"{'call+' if several else 'call'} | {body}", rules)

    def text_with_calls(self, *, several: bool) -> str:
        """Free text, in which calls keep to their schemas."""
        return self._document("ANY_TEXT (call ANY_TEXT)*" if several else "ANY_TEXT (call ANY_TEXT)?")

    def _document(self, start: str, rules: str = "") -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, rules]) + "\n"

    def _tag(self, tag: Tag) -> str:
        return f"<[{self._ids[tag.value]}]>"

    def _tool(self, number: int, tool: DeclaredTool) -> str:
        """Adds the rules of one tool; returns the name of its rule."""
        made = len(self._rules)
        try:
            ways = self._ways(number, tool)
        except UnsupportedParameter:
            if tool.must_hold:
                raise
            del self._rules[made:]
            ways = [self._added(number, "ANY_TEXT", "ANY_TEXT") + "*"]
        rest = ways[0] if len(ways) == 1 else "(" + " | ".join(way or '""' for way in ways) + ")"
        parts = [literal(tool.name), literal(self._style.after_name), rest]
        self._rules.append(f"tool_{number}: {' '.join(filter(None, parts))}")
        return f"tool_{number}"

    def _ways(self, number: int, tool: DeclaredTool) -> list[str]:
        """The ways to give a tool its arguments."""
        check_support(tool.parameters, tool.path, None, CALL_ADVICE)
        document = Document(tool.parameters, tool.path, CALL_ADVICE)
        return [self._arguments(number, way, document) for way in object_ways(document)]

    def _arguments(self, number: int, way: ObjectWay, document: Document) -> str:
        """One way to give a tool its arguments: rules of their own, in their order."""
        parts = []
        for key, schemas in way.properties.items():
            if key != key.strip():
                # White space around a key is the model family's own and says nothing.
                value, why = None, "has white space around its name, which a call does not carry"
            else:
                value, why = self._values.rule(document, schemas), "is required, but no value fits it"
            if value is None and key in way.required:
                document.refuse(schemas[0][0], why)
            if value is not None:
                parts.append(self._added(number, literal(key) or '""', value) + ("" if key in way.required else "?"))
        if not way.properties and way.extra is not None:
            value = self._values.rule(document, [way.extra])
            parts += [] if value is None else [self._added(number, "ANY_TEXT", value) + "*"]
        return " ".join(parts)

    def _added(self, number: int, key: str, value: str) -> str:
        name = f"tool_{number}_arg_{len(self._rules)}"
        self._rules.append(f"{name}: {self._argument(key, value)}")
        return name

    def _argument(self, key: str, value: str) -> str:
        style = self._style
        parts = [self._tag(Tag.KEY), key, self._tag(Tag.KEY_END), literal(style.after_key)]
        parts += [self._tag(Tag.VALUE), value, self._tag(Tag.VALUE_END), literal(style.after_value)]
        return " ".join(filter(None, parts))
