"""Messages and tools → prompt token ids, by the checkpoint's own chat template."""

from __future__ import annotations

import datetime
import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import CheckpointError, EngineFailed, InvalidRequest, UnsupportedParameter
from services.gateway.tokenizer import PromptTokenizer
from services.gateway.tool_grammar import CallStyle

THINK = "<think>"
THINK_END = "</think>"
ASSISTANT = "<|assistant|>"


class PromptTail(enum.Enum):
    """Where the prompt leaves the model: the parser starts there."""

    REASONING = "reasoning"  # the prompt ends with an open <think>
    UNDECIDED = "undecided"  # the model itself opens its reasoning, as GLM-4.5 does
    CONTENT = "content"


@dataclass(frozen=True)
class Thinking:
    """How much the model is asked to think.

    Attributes:
        effort: ``low``, ``high`` or ``max``, as the template names it.
        off: the client wants an answer without reasoning and the server's policy lets it have one.
        clear: earlier reasoning leaves the prompt (`clear_thinking`).
    """

    effort: str
    off: bool = False
    clear: bool = False


@dataclass(frozen=True)
class ChatPrompt:
    """A tokenised conversation.

    Attributes:
        token_ids: the whole prompt.
        tail: where it leaves the model.
    """

    token_ids: list[int]
    tail: PromptTail


@dataclass(frozen=True)
class Prefill:
    """The beginning of the assistant's turn, to be continued.

    Attributes:
        reasoning: what it thought.
        content: what it said; with None the reasoning goes on.
    """

    reasoning: str
    content: str | None

    @property
    def in_reasoning(self) -> bool:
        """True when the model goes on thinking."""
        return self.content is None


class ChatTemplate:
    """The checkpoint's chat template in a sandbox, with what transformers gives templates.

    Args:
        source: text of chat_template.jinja.
        tokenizer: keeps the client's text apart from control tokens.

    Raises:
        CheckpointError: the template does not compile.
    """

    def __init__(self, source: str, tokenizer: PromptTokenizer) -> None:
        if not source:
            raise CheckpointError("the checkpoint has no chat template: /v1/chat/completions cannot be served")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat_template.jinja line {error.lineno}: {error.message}") from error
        self._tokenizer = tokenizer
        self.call_style = _call_style(self._template)

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        thinking: Thinking,
        prefill: Prefill | None = None,
        *,
        must_fit: bool = False,
    ) -> ChatPrompt:
        """Renders and encodes a conversation, ready for the next assistant turn.

        Args:
            messages: as `services.gateway.messages.normalise` returns them.
            tools: OpenAI tool definitions; may be empty.
            thinking: effort and the like.
            prefill: what the assistant's turn begins with.
            must_fit: a prompt that is far longer than the context may be refused before it is encoded.

        Raises:
            ContextLengthExceeded: it is.
            InvalidRequest: the template refuses the conversation.
        """
        rendered = self._render(messages, tools, thinking)
        if thinking.off and rendered.endswith(THINK):
            rendered += THINK_END
        if prefill is not None:
            rendered = _continued(rendered, prefill, self._tokenizer.mark)
        if rendered.endswith(THINK) or (prefill is not None and prefill.in_reasoning):
            tail = PromptTail.REASONING
        elif prefill is None and not thinking.off and rendered.rstrip("\n").endswith(ASSISTANT):
            tail = PromptTail.UNDECIDED
        else:
            tail = PromptTail.CONTENT
        return ChatPrompt(self._tokenizer.encode_rendered(rendered, must_fit=must_fit), tail)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: Thinking) -> str:
        context: dict[str, Any] = {
            "messages": self._tokenizer.mark_tree(messages),
            "tools": self._tokenizer.mark_tree(tools) or None,
            "add_generation_prompt": True,
            "reasoning_effort": thinking.effort,
            "enable_thinking": not thinking.off,
            "clear_thinking": thinking.clear,
        }
        try:
            return self._template.render(context)
        except _TemplateRefusal as error:
            reason = self._tokenizer.unmark(str(error))
            raise InvalidRequest(f"The chat template refuses these messages: {reason}", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            # Messages were normalised before: what fails now is the template's fault, or ours.
            raise EngineFailed(f"The chat template failed: {type(error).__name__}") from error


def _continued(rendered: str, prefill: Prefill, mark: Callable[[str], str]) -> str:
    """The rendered prompt with the beginning of the turn; the client's text is marked."""
    if prefill.content is None:
        return (rendered if rendered.endswith(THINK) else rendered.removesuffix(THINK_END) + THINK) + mark(prefill.reasoning)
    if rendered.endswith(THINK):
        return rendered + mark(prefill.reasoning) + THINK_END + mark(prefill.content)
    return rendered + mark(prefill.content)


_STYLE = re.compile(r"<tool_call>\s*probe(\s*)<arg_key>key</arg_key>(\s*)<arg_value>value</arg_value>(\s*)</tool_call>")


def _call_style(template: jinja2.Template) -> CallStyle:
    """The white space of a call, as the template itself writes one; that of GLM-4.7 and later where it writes none."""
    call = {"id": "a", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        rendered = template.render(messages=messages, tools=None, add_generation_prompt=False)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return CallStyle()
    found = _STYLE.search(rendered)
    return CallStyle(*found.groups()) if found else CallStyle()


def resolve_thinking(
    *, effort: str | None, enabled: bool | None, clear: bool | None, default_effort: str, off_policy: str, param: str
) -> Thinking:
    """Turns what clients say about thinking into what the template and the parser need.

    Args:
        effort: reasoning_effort: none, minimal, low, medium, high, xhigh, max or None.
        enabled: an explicit switch (enable_thinking, thinking.type); beats `effort` where they disagree.
        clear: clear_thinking.
        default_effort: the server's effort for requests that name none.
        off_policy: what switching off does: empty_think, low or reject.
        param: the request field to blame when it is refused.

    Raises:
        UnsupportedParameter: thinking off is asked for and the policy is ``reject``.
    """
    levels = {"low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
    off = enabled is False or (enabled is None and effort in ("none", "minimal"))
    level = levels.get(effort or "", default_effort)
    if not off:
        return Thinking(level, clear=bool(clear))
    if off_policy == "reject":
        raise UnsupportedParameter(
            f"This server always thinks: {param} cannot turn it off. Use reasoning_effort low, high or max.", param=param
        )
    if off_policy == "low":
        return Thinking("low", clear=bool(clear))
    return Thinking(level, off=True, clear=bool(clear))


class _TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` was called by the template."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: templates are prompts, not web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
