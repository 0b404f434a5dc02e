"""Fields that are refused because honouring them is not possible and ignoring them would change the answer.

They are those of OpenAI's API, vLLM, SGLang, llama-server and TabbyAPI; those that only some of our endpoints have are refused by the
others. Fields that only say how a server should go about its work
(caches, slots, backends, extra timings) are ignored instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import UnsupportedParameter
from services.gateway.formats import Body
from services.gateway.schema_places import written
from services.gateway.schemas import ChatRequest, SamplingFields

# Field → the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM
    "chat_template": (),
    "documents": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "structural_tag": ("",),
    "token_ids_logprob": ([],),
    # llama-server
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "reasoning_format": ("auto", "deepseek", "deepseek-legacy"),
    "samplers": ([],),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1, 1.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
    # TabbyAPI
    "adaptive_target": (-1, -1.0, 1, 1.0),
    "banned_strings": ("", []),
    "banned_tokens": ("", []),
    "mirostat_mode": (0,),
    "skew": (0, 0.0),
    "smoothing_factor": (0, 0.0),
    "tfs": (1, 1.0),
    "token_healing": (False,),
    "top_a": (0, 0.0),
    "typical": (1, 1.0),
    # Other names of what this server has: ignoring them would be as wrong.
    "enable_thinking": (True,),
    "extra_body": ({},),
    "max_length": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "repeat_penalty": (1, 1.0),
    "response_prefix": ("",),
    "template_vars": ({},),
    "thinking_budget": (-1,),
}

OWN_NAMES = {
    "enable_thinking": "chat_template_kwargs",
    "extra_body": "its fields by themselves",
    "function_call": "tool_choice",
    "functions": "tools",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs and top_logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "reasoning_budget": "thinking_token_budget",
    "reasoning_budget_tokens": "thinking_token_budget",
    "repeat_penalty": "repetition_penalty",
    "response_prefix": "continue_final_message",
    "template_vars": "chat_template_kwargs",
    "thinking_budget": "thinking_token_budget",
}

# Fields of the chat API that /v1/responses and /v1/messages have no way to answer, and the values that ask for nothing.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "logprobs": (False, 0),
    "n": (1,),
    "top_logprobs": (0,),
}

# Fields that an API has under another name, and what to use there: `max_tokens` that nobody heeds is an answer without an end.
_CHAT_URL = "/v1/chat/completions"
_OF_CHAT = {
    "input": "messages",
    "input_ids": "/v1/completions",
    "instructions": "a message of the role system",
    "max_output_tokens": "max_completion_tokens",
    "output_config": "response_format and reasoning_effort",
    "previous_response_id": "/v1/responses",
    "prompt": "messages",
    "prompt_embeds": "messages",
    "sampling_params": "its fields by themselves",
    "stop_sequences": "stop",
    "system": "a message of the role system",
}
_OF_COMPLETIONS = {
    "input": "prompt",
    "input_ids": "prompt",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "messages": _CHAT_URL,
    "prompt_embeds": "prompt",
    "sampling_params": "its fields by themselves",
    "stop_sequences": "stop",
    "thinking_token_budget": _CHAT_URL,
    "tool_choice": _CHAT_URL,
    "tools": _CHAT_URL,
    "top_logprobs": "logprobs",
}
OF_RESPONSES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "stop_sequences": "stop",
    "system": "instructions",
}
OF_MESSAGES = {
    "input": "messages",
    "instructions": "system",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "response_format": "output_config.format",
}
OF_GENERATE = {
    "echo": "logprob_start_len: 0",
    "logprobs": "return_logprob and top_logprobs_num",
    "max_completion_tokens": "sampling_params.max_new_tokens",
    "max_output_tokens": "sampling_params.max_new_tokens",
    "max_tokens": "sampling_params.max_new_tokens",
    "messages": _CHAT_URL,
    "min_tokens": "sampling_params.min_new_tokens",
    "prompt": "text",
    "seed": "sampling_params.sampling_seed",
    "stop_sequences": "sampling_params.stop",
}
# Their values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "logprobs": (False,),
    "min_tokens": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
}


def refuse_unsupported(request: SamplingFields) -> None:
    """Refuses what would silently change the answer.

    Raises:
        UnsupportedParameter: names the field.
    """
    refuse_fields(request.model_extra)
    refuse_other_names(request.model_extra, _OF_CHAT if isinstance(request, ChatRequest) else _OF_COMPLETIONS)
    if isinstance(request, ChatRequest):
        for name in ("chat_template_kwargs", "reasoning", "thinking"):
            refuse_unknown(getattr(request, name), name)


def refuse_unknown(options: Body | None, param: str) -> None:
    """Refuses fields that a group of options does not have: each would change what the model is asked.

    Raises:
        UnsupportedParameter: names the field, and those that there are.
    """
    if options is None:
        return
    for name, value in (options.model_extra or {}).items():
        if value is not None:
            known = ", ".join(type(options).model_fields)
            raise UnsupportedParameter(f"{written(param, name)} is not an option of this server; {param} has {known}.", param=param)


def refuse_chat_only(unknown: Mapping[str, Any] | None) -> None:
    """Refuses what only the chat API can answer, on the URLs of the other APIs.

    Raises:
        UnsupportedParameter: names the field.
    """
    for name, neutral in CHAT_ONLY.items():
        value = (unknown or {}).get(name)
        if value is not None and not _is_one_of(value, neutral):
            raise UnsupportedParameter(f"{name} is not supported here; leave it out, or use {_CHAT_URL}.", param=name)


def refuse_other_names(unknown: Mapping[str, Any] | None, names: Mapping[str, str]) -> None:
    """Refuses fields that this API has under another name.

    Args:
        names: such fields, and what to use.

    Raises:
        UnsupportedParameter: names both.
    """
    for name, value in (unknown or {}).items():
        if name in names and value not in (None, "", [], {}) and not _is_one_of(value, _NOTHING.get(name, ())):
            raise UnsupportedParameter(f"{name} is not a field of this URL; use {names[name]}.", param=name)


def refuse_fields(unknown: Mapping[str, Any] | None, param: str | None = None) -> None:
    """Refuses fields of `REFUSED` unless their value asks for nothing.

    Args:
        unknown: fields of a body that its class does not have.
        param: the field that they stand in, if not in the body itself.

    Raises:
        UnsupportedParameter: names the field, and what to use instead where there is something.
    """
    for name, value in (unknown or {}).items():
        if value is None or name not in REFUSED:
            continue
        if not _is_one_of(value, REFUSED[name]):
            shown = name if param is None else f"{param}.{name}"
            if name in SamplingFields.model_fields:
                message = f"{shown} is not supported here; leave it out, or use {_CHAT_URL} or /v1/completions."
            else:
                message = f"{shown} is not supported by this server; {f'use {OWN_NAMES[name]}' if name in OWN_NAMES else 'leave it out'}."
            raise UnsupportedParameter(message, param=param or name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True for one of the values, of its own type: `true` is not 1."""
    return any(value == item and type(value) is type(item) for item in neutral)
