"""A checked chat request → jobs for the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Head, UsageOptions
from services.gateway.beside import SMALL_CHARS, beside
from services.gateway.chat_answer import ChatAnswer, ChatOptions
from services.gateway.constraints import Constrained, ToolDemand, constraint_for
from services.gateway.errors import EmptyArray
from services.gateway.messages import normalise
from services.gateway.parser import OutputParser
from services.gateway.prompt import THINK, THINK_END, ChatPrompt, Prefill, PromptTail, Thinking, resolve_thinking
from services.gateway.sampling import (
    NO_LOGPROBS,
    bad_word_ids,
    for_choice,
    kept_tokens,
    num_prompt_logprobs,
    priority_of,
    room_for_answer,
    sampling_params,
)
from services.gateway.schemas import ChatRequest, NamedTool, SamplingFields
from services.gateway.services import Job
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import text_size
from services.gateway.tool_check import check_names, check_schemas
from services.gateway.tool_schema import ToolSchemas
from services.gateway.worker_client import Language


@dataclass(frozen=True)
class ChatPlan:
    """A chat request, ready to run, before any API's way of answering.

    Attributes:
        requests: one for each choice.
        parsers: one for each choice.
        prompt_tokens: length of the prompt.
        params: the worker's names of fields → the request's.
        continued: what the answer continues.
        named_tool: tool_choice names a tool.
    """

    requests: Sequence[pb.GenerateRequest]
    parsers: Sequence[OutputParser]
    prompt_tokens: int
    params: dict[str, str]
    continued: str
    named_tool: bool


async def prepare(body: ChatRequest, info: pb.InfoResponse, language: Language, settings: GatewaySettings, request_id: str) -> Job:
    """A job that answers as OpenAI's chat completions. Arguments and errors as `plan_chat`."""
    plan = await plan_chat(body, info, language, settings, request_id)
    options = ChatOptions(
        usage_options(body),
        logprobs=bool(body.logprobs),
        names_by_id=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        prompt_ids=plan.requests[0].prompt_token_ids if body.return_token_ids else None,
        show_reasoning=body.include_reasoning is not False,
        reasoning_fields=_REASONING_FIELDS[settings.reasoning_fields],
        named_tool=plan.named_tool,
        echo=plan.continued if body.echo else "",
    )
    answer = ChatAnswer(Head.of("chatcmpl", request_id, info), plan.parsers, plan.prompt_tokens, options)
    return Job(plan.requests, answer, plan.params)


_REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


async def plan_chat(body: ChatRequest, info: pb.InfoResponse, language: Language, settings: GatewaySettings, request_id: str) -> ChatPlan:
    """Renders, encodes and maps a request.

    Args:
        body: the checked request.
        info: what the worker serves.
        language: tokenizer and template.
        settings: the gateway's.
        request_id: our id; names the jobs in the worker and the answer.

    Raises:
        InvalidRequest: names the field at fault.
    """
    demand = await _demand(body, language)
    max_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked_max = getattr(body, max_param)
    kept = kept_tokens(body, info.max_context, asked_max)
    prompt, prefill = await _rendered(body, demand, language, settings, must_fit=kept is None)
    token_ids = prompt.token_ids if kept is None else prompt.token_ids[-kept:]
    room = room_for_answer(len(token_ids), info.max_context, "messages")
    prompt_top = num_prompt_logprobs(body)
    sampling = sampling_params(
        body,
        asked_max=asked_max,
        max_param=max_param,
        room=room,
        vocab_size=info.vocab_size,
        logprobs=_num_logprobs(body),
        bad_words=await bad_word_ids(body.bad_words, language.tokenizer),
    )
    constrained = await constraint_for(body, demand, tail=prompt.tail, language=language, supported=info.supports_grammar)
    base = pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        grammar=constrained.grammar if constrained is not None else None,
        priority=priority_of(body.priority),
        thinking_budget=_budget(body, prompt.tail, language),
        prompt_logprobs=prompt_top is not None,
        prompt_top=prompt_top or 0,
    )
    count = body.n or 1
    requests = copies(base, sampling, count)
    for request in requests[1:]:
        # The prompt's log-probabilities are the same for every choice, and asking for them keeps a prompt out of the cache.
        request.prompt_logprobs = False
    return ChatPlan(
        requests,
        [_parser(body, prompt.tail, demand, language) for _ in range(count)],
        len(token_ids),
        params_of(constrained, max_param),
        prefill.content or "" if prefill is not None else "",
        isinstance(body.tool_choice, NamedTool),
    )


async def render(body: ChatRequest, language: Language, settings: GatewaySettings) -> ChatPrompt:
    """The prompt that a chat request would get."""
    prompt, _prefill = await _rendered(body, await _demand(body, language), language, settings, must_fit=False)
    return prompt


async def _rendered(
    body: ChatRequest, demand: ToolDemand | None, language: Language, settings: GatewaySettings, *, must_fit: bool
) -> tuple[ChatPrompt, Prefill | None]:
    messages = _messages(body, settings)
    prefill = _prefill(body, messages)
    shown = messages if prefill is None else messages[:-1]
    return await _prompt(shown, demand, _thinking(body, settings), prefill, language, must_fit), prefill


def copies(base: pb.GenerateRequest, sampling: pb.SamplingParams, count: int, first: int = 0) -> list[pb.GenerateRequest]:
    """The same request `count` times, each with an id and draws of its own; a single one keeps its id."""
    found = []
    for choice in range(first, first + count):
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        request.sampling.CopyFrom(for_choice(sampling, choice - first))
        if choice:
            request.request_id = f"{base.request_id}-{choice}"
        found.append(request)
    return found


def params_of(constrained: Constrained | None, max_param: str) -> dict[str, str]:
    """The worker's names of fields → those of the request."""
    params = {"max_tokens": max_param}
    if constrained is not None:
        params["grammar"] = constrained.param
    return params


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
    # Before each of them is looked at.
    calls = [message.get("tool_calls") for message in body.messages if isinstance(message, dict)]
    most = max((len(each) for each in calls if isinstance(each, list)), default=0)
    if most > settings.max_tools:
        raise InvalidRequest(
            f"messages: one has {most} tool calls; this server takes {settings.max_tools} in one (GLM53_MAX_TOOLS).", param="messages"
        )
    return normalise(body.messages)


def _prefill(body: ChatRequest, messages: list[dict[str, Any]]) -> Prefill | None:
    """The last message as the beginning of the answer, where the request continues it.

    Raises:
        InvalidRequest: vLLM's pair of fields contradicts itself, or the last message is nothing to continue.
    """
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            raise UnsupportedParameter(
                "add_generation_prompt: false is supported only with continue_final_message: true.", param="add_generation_prompt"
            )
        return None
    if body.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt cannot both be true.", param="continue_final_message")
    last = messages[-1]
    path = f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise InvalidRequest(f"continue_final_message needs {path} to be of the role assistant.", param="continue_final_message")
    if last.get("tool_calls"):
        raise InvalidRequest(f"continue_final_message cannot continue {path}, which has tool_calls.", param="continue_final_message")
    reasoning, content = last.get("reasoning_content", ""), last["content"]
    if not reasoning and content.startswith(THINK) and THINK_END in content:
        # Reasoning inside the content, as clients keep it that know no field for it.
        reasoning, _, content = content.removeprefix(THINK).partition(THINK_END)
        return Prefill(reasoning, content)
    return Prefill(reasoning, None if reasoning and not content else content)


async def _demand(body: ChatRequest, language: Language) -> ToolDemand | None:
    """What tool_choice asks for; None for no tools."""
    choice = body.tool_choice
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    check_names(tools)
    if body.tool_choice != "none":
        # Before each schema is looked at: what cannot be in a prompt needs no closer look.
        language.tokenizer.check_size(text_size(tools), "tools")
    await check_schemas(tools)
    declared = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, NamedTool) and choice.function.name not in declared:
        raise InvalidRequest(f"tool_choice names {choice.function.name!r}, which is not in tools.", param="tool_choice")
    if choice == "required" and not declared:
        raise InvalidRequest("tool_choice required needs tools.", param="tool_choice")
    if choice == "none" or not body.tools:
        return None
    if not language.vocabulary.has_tools:
        raise UnsupportedParameter("tools: this model's vocabulary has no tool-call tokens.", param="tools")
    several = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return ToolDemand(tools, forced=True, several=False, only=choice.function.name)
    return ToolDemand(tools, forced=choice == "required", several=several)


def _parser(body: ChatRequest, tail: PromptTail, demand: ToolDemand | None, language: Language) -> OutputParser:
    return OutputParser(
        language.vocabulary,
        tail,
        ToolSchemas(demand.tools) if demand is not None else None,
        keep_special=body.skip_special_tokens is False,
        parallel=body.parallel_tool_calls is not False,
        trim_newlines="\n" in language.template.call_style.after_name,
    )


def _budget(body: ChatRequest, tail: PromptTail, language: Language) -> pb.ThinkingBudget | None:
    """The reasoning budget; a prompt after which nothing is reasoned needs none."""
    end = language.tokenizer.control_ids.get(THINK_END)
    if body.thinking_token_budget is None or tail is PromptTail.CONTENT or end is None:
        return None
    return pb.ThinkingBudget(budget=body.thinking_token_budget, end_token_id=end, forced_token_ids=[end])


def _thinking(body: ChatRequest, settings: GatewaySettings) -> Thinking:
    """What the request says about thinking, in whichever dialect it says it."""
    options = body.chat_template_kwargs
    enabled, effort, clear, param = None, _effort(body), None, "reasoning_effort"
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


def _effort(body: ChatRequest) -> str | None:
    """The effort that is asked for.

    Raises:
        InvalidRequest: two fields ask for different ones.
    """
    other = body.reasoning.effort if body.reasoning is not None else None
    if body.reasoning_effort is None or other in (None, body.reasoning_effort):
        return body.reasoning_effort or other
    raise InvalidRequest(f"reasoning.effort is {other}, but reasoning_effort is {body.reasoning_effort}; send one.", param="reasoning")


async def _prompt(
    messages: list[dict[str, Any]],
    demand: ToolDemand | None,
    thinking: Thinking,
    prefill: Prefill | None,
    language: Language,
    must_fit: bool,
) -> ChatPrompt:
    tools = list(demand.tools) if demand is not None else []
    # Templates leave earlier reasoning out, never what was said.
    language.tokenizer.check_size(sum(len(message["content"]) for message in messages) + text_size(tools), "messages")
    size = text_size(messages) + text_size(tools)
    if size < SMALL_CHARS and len(messages) < 100:
        return language.template.prompt(messages, tools, thinking, prefill)
    return await beside(language.template.prompt, messages, tools, thinking, prefill, must_fit=must_fit)


def _num_logprobs(body: ChatRequest) -> int:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else NO_LOGPROBS
