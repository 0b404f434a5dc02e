"""The bodies of both POST endpoints: names, types and ranges.

Types are strict: ``"1"`` and ``true`` are not numbers, ``NaN`` is no value. Fields that we do not know are ignored, as clients
of other servers expect; fields that would change the answer and cannot be honoured are refused by `refusals.py`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from prometheus_client import Counter
from pydantic import ConfigDict, Field, ValidationError, field_validator

from services.common.errors import InvalidRequest
from services.gateway.formats import FIRST, Body, Choices, Int, ResponseFormat, StructuredOutputs
from services.gateway.mistakes import mistake_of, shown

log = logging.getLogger(__name__)

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_INT64 = 2**63
_MAX_FIELDS = 1000
_TOKEN_KEYS: dict[str, Any] = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}}


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """What both endpoints share."""

    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None,
        Field(json_schema_extra=_TOKEN_KEYS),
    ] = None
    seed: Annotated[Int, Field(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: str | Annotated[list[str], FIRST] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024), FIRST] | None = None
    min_tokens: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None
    max_tokens: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    bad_words: Annotated[list[str], Field(max_length=1024), FIRST] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=262_144), FIRST] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: Annotated[Int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > 16:
            raise ValueError(f"has {len(strings)} strings; at most 16 are taken")
        for text in strings:
            if not text:
                raise ValueError("holds an empty string, which would stop everything")
            if len(text.encode(errors="replace")) > 512:
                raise ValueError("holds a string of more than 512 bytes")
        return value

    @field_validator("bad_words")
    @classmethod
    def _bad_words(cls, value: list[str] | None) -> list[str] | None:
        for text in value or []:
            if not text:
                raise ValueError("holds an empty string, which is in everything")
            if len(text.encode(errors="replace")) > 512:
                raise ValueError("holds a string of more than 512 bytes")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_keys(cls, value: Any) -> Any:
        for key, bias in value.items() if isinstance(value, dict) else ():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key and int(key) < 2**32):
                raise ValueError(f'has the key {key[:40]!r}; keys are token ids, e.g. "42"')
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"has {shown(bias)} for the token {key}; values are numbers from -100 to 100")
        return value


# OpenAI's rule is [A-Za-z0-9_-]{1,64}; agents also send dots, colons, slashes and letters of other scripts, as vLLM lets them. What would
# not come back from the model as it went in is refused: white space, control characters and what the template's tags are made of.
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s<>\x00-\x1f\x7f]+$")]
Parameters = Annotated[
    dict[str, Any],
    Field(
        description="A valid JSON schema of an object, with references into itself only, at most 100 levels deep and of 5000 "
        "schemas. Calls that are forced or strict are held to all of it; what cannot be enforced then (uniqueItems, not, if, "
        "contains, ...) is refused by its place."
    ),
]


class Function(Body):
    """A tool's function."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a named tool_choice."""

    name: str


class NamedTool(Body):
    """`tool_choice` that names a tool."""

    type: Literal["function"]
    function: NamedFunction


# For /openapi.json; refusals.py refuses what these classes do not have.
_NOTHING_ELSE = ConfigDict(json_schema_extra={"additionalProperties": False})


class Reasoning(Body):
    """`reasoning`, as OpenAI's Responses API and OpenRouter have it; there are no summaries to choose between."""

    model_config = _NOTHING_ELSE
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TemplateOptions(Body):
    """`chat_template_kwargs`: what the chat template lets a client choose."""

    model_config = _NOTHING_ELSE
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    clear_thinking: bool | None = None


class ThinkingSwitch(Body):
    """`thinking`, as z.ai's API has it."""

    model_config = _NOTHING_ELSE
    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None


def _message(*roles: str, required: tuple[str, ...] = ("role", "content"), **more: Any) -> dict[str, Any]:
    parts = {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type", "text"], "properties": _TEXT_PART}}
    content = {"anyOf": [{"type": "string"}, parts]}
    return {"type": "object", "required": list(required), "properties": {"role": {"enum": list(roles)}, "content": content, **more}}


_TEXT_PART = {"type": {"const": "text"}, "text": {"type": "string"}}
# For /openapi.json: messages are checked one by one in messages.py, so that errors name the part at fault.
_MESSAGES_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "anyOf": [
            _message("system", "developer", "user"),
            _message("assistant", reasoning_content={"type": "string"}),
            _message("tool", tool_call_id={"type": "string"}),
        ]
    },
}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Any], Field(json_schema_extra=_MESSAGES_SCHEMA)]
    max_completion_tokens: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking: ThinkingSwitch | None = None
    thinking_token_budget: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None


def our_names(names: Mapping[str, str], body: Body) -> dict[str, str]:
    """Of our names → the client's, those that the client did not write itself."""
    return {ours: theirs for ours, theirs in names.items() if ours not in (body.model_extra or {})}


RequestT = TypeVar("RequestT", bound=SamplingFields)
BodyT = TypeVar("BodyT", bound=Body)


@contextlib.contextmanager
def renaming(params: Mapping[str, str], words: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Errors from inside name the fields as the client knows them.

    Args:
        params: our names → theirs.
        words: what stands in paths and messages → what stands there for the client; longer words before those that they contain.
    """
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in words.items():
            word = re.compile((r"(?<![\w.])" if ours[0].isalnum() else "") + re.escape(ours) + (r"(?!\w)" if ours[-1].isalnum() else ""))
            error.message = word.sub(theirs, error.message)
            if error.param is not None and error.param not in params:
                error.param = word.sub(theirs, error.param)
        if error.param is not None:
            error.param = params.get(error.param, error.param)
        raise


def parse(schema: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Checks a body.

    Raises:
        InvalidRequest: names the first field at fault in `param`.
    """
    if len(body) > _MAX_FIELDS:
        raise InvalidRequest(f"The body has {len(body)} fields; this server takes {_MAX_FIELDS}.")
    try:
        request = schema.model_validate(body)
    except ValidationError as error:
        raise mistake_of(error) from None
    _note_unknown(request)
    return request


# Of the whole process, because checking a body knows no gateway: what clients say and nobody hears.
UNKNOWN_FIELDS = Counter("glm53_gateway_unknown_fields", "Fields of requests that the URL has no such field for.", ["field"], registry=None)
_noted: set[str] = set()
_MAX_NOTED = 256
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def _note_unknown(request: Body) -> None:
    """Counts unknown fields, and says once per name that they are ignored. Names come from clients: few, short and plain ones count."""
    for name in request.model_extra or {}:
        if name not in _noted:
            if len(_noted) >= _MAX_NOTED or not _FIELD_NAME.match(name):
                UNKNOWN_FIELDS.labels("other").inc()
                continue
            _noted.add(name)
            log.info("ignoring the unknown field %s: a field of another server, or misspelt", name)
        UNKNOWN_FIELDS.labels(name).inc()


# What clients of vLLM and SGLang also send to the APIs of OpenAI and Anthropic that have no such fields.
_SAMPLING = (
    "chat_template_kwargs",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "json_schema",
    "reasoning_effort",
    "regex",
    "structured_outputs",
    "thinking",
    "thinking_token_budget",
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "top_k",
)


def with_sampling(fields: dict[str, Any], body: Body) -> dict[str, Any]:
    """Fields of a chat request, with those of sampling, forms and thinking that a body of another API has beyond its own."""
    extra = body.model_extra or {}
    return fields | {name: extra[name] for name in _SAMPLING if name in extra and fields.get(name) is None}
