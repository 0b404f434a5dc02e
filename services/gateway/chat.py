"""A checked chat request → a job for the worker."""

from __future__ import annotations

import asyncio
from typing import Any

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Head, UsageOptions
from services.gateway.chat_answer import ChatAnswer, ChatOptions
from services.gateway.errors import EmptyArray
from services.gateway.messages import normalise
from services.gateway.parser import OutputParser
from services.gateway.prompt import THINK_END, ChatPrompt, PromptTail, Thinking, resolve_thinking
from services.gateway.sampling import NO_LOGPROBS, grammar_for, room_for_answer, sampling_params
from services.gateway.schemas import ChatRequest, NamedTool, SamplingFields
from services.gateway.services import Job
from services.gateway.settings import GatewaySettings
from services.gateway.tool_schema import ToolSchemas
from services.gateway.worker_client import Language

# Longer prompts are rendered and encoded beside the event loop, so that running streams go on.
_LARGE_PROMPT_CHARS = 20_000


async def prepare(body: ChatRequest, info: pb.InfoResponse, language: Language, settings: GatewaySettings, request_id: str) -> Job:
    """Renders, encodes and maps a request.

    Args:
        body: the checked request.
        info: what the worker serves.
        language: tokenizer and template.
        settings: the gateway's.
        request_id: our id; names the job in the worker and the answer.

    Raises:
        InvalidRequest: names the field at fault.
    """
    messages = _messages(body, settings)
    tools = _tools(body, language)
    thinking = _thinking(body, settings)
    prompt = await _prompt(messages, tools, thinking, language)
    room = room_for_answer(len(prompt.token_ids), info.max_context, "messages")
    max_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling_params(
            body,
            asked_max=getattr(body, max_param),
            max_param=max_param,
            room=room,
            vocab_size=info.vocab_size,
            logprobs=_num_logprobs(body),
        ),
        grammar=grammar_for(
            body.response_format,
            info.supports_grammar,
            language.tokenizer.control_ids.get(THINK_END, 0) if prompt.tail is PromptTail.REASONING else 0,
        ),
    )
    parser = OutputParser(
        language.vocabulary,
        prompt.tail,
        ToolSchemas(tools) if tools else None,
        keep_special=body.skip_special_tokens is False,
        parallel=body.parallel_tool_calls is not False,
    )
    answer = ChatAnswer(
        Head.of("chatcmpl", request_id, info),
        [parser],
        len(prompt.token_ids),
        ChatOptions(usage_options(body), bool(body.logprobs), body.include_reasoning is not False),
    )
    return Job([request], answer)


def usage_options(body: SamplingFields) -> UsageOptions:
    """What `stream_options` asks for.

    Raises:
        InvalidRequest: it is given without `stream`.
    """
    options = body.stream_options
    if options is None:
        return UsageOptions()
    if not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    wanted = bool(options.include_usage)
    return UsageOptions(at_end=wanted, in_every_chunk=wanted and bool(options.continuous_usage_stats))


def _messages(body: ChatRequest, settings: GatewaySettings) -> list[dict[str, Any]]:
    if not body.messages:
        raise EmptyArray("messages must have at least one message.", param="messages")
    if len(body.messages) > settings.max_messages:
        raise InvalidRequest(
            f"messages has {len(body.messages)} messages; this server takes {settings.max_messages} (GLM53_MAX_MESSAGES).",
            param="messages",
        )
    return normalise(body.messages)


def _tools(body: ChatRequest, language: Language) -> list[dict[str, Any]]:
    """The tools that the prompt shows; none for tool_choice none."""
    choice = body.tool_choice
    declared = [tool.function.name for tool in body.tools or []]
    if isinstance(choice, NamedTool) and choice.function.name not in declared:
        raise InvalidRequest(f"tool_choice names {choice.function.name!r}, which is not in tools.", param="tool_choice")
    if choice == "required" or isinstance(choice, NamedTool):
        raise UnsupportedParameter("tool_choice: this server cannot force a tool call yet; use auto or none.", param="tool_choice")
    if choice == "none" or not body.tools:
        return []
    if not language.vocabulary.has_tools:
        raise UnsupportedParameter("tools: this model's vocabulary has no tool-call tokens.", param="tools")
    return [tool.model_dump(exclude_unset=True) for tool in body.tools]


def _thinking(body: ChatRequest, settings: GatewaySettings) -> Thinking:
    """What the request says about thinking, in whichever dialect it says it."""
    options = body.chat_template_kwargs
    enabled, effort, clear, param = None, body.reasoning_effort, None, "reasoning_effort"
    if body.thinking is not None:
        enabled, clear, param = body.thinking.type == "enabled", body.thinking.clear_thinking, "thinking"
    if options is not None:
        switch = options.enable_thinking if options.enable_thinking is not None else options.thinking
        enabled, param = (enabled, param) if switch is None else (switch, "chat_template_kwargs")
        effort = options.reasoning_effort or effort
        clear = clear if options.clear_thinking is None else options.clear_thinking
    return resolve_thinking(
        effort=effort,
        enabled=enabled,
        clear=clear,
        default_effort=settings.default_reasoning_effort,
        off_policy=settings.thinking_off_policy,
        param=param,
    )


async def _prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: Thinking, language: Language) -> ChatPrompt:
    size = sum(len(message["content"]) for message in messages)
    if size < _LARGE_PROMPT_CHARS and len(messages) < 100:
        return language.template.prompt(messages, tools, thinking)
    return await asyncio.to_thread(language.template.prompt, messages, tools, thinking)


def _num_logprobs(body: ChatRequest) -> int:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else NO_LOGPROBS
