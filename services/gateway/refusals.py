"""Fields that are refused because honouring them is not possible and ignoring them would change the answer."""

from __future__ import annotations

from typing import Any

from services.common.errors import UnsupportedParameter
from services.gateway.schemas import ChatRequest, SamplingFields

# Fields that change the answer and that this server cannot honour, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "separate_reasoning": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# What chat_template_kwargs must not replace: these are the conversation, not an option of the template.
_TEMPLATE_RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "tokenize",
    "tools",
)


def refuse_unsupported(request: SamplingFields) -> None:
    """Refuses what would silently change the answer.

    Raises:
        UnsupportedParameter: names the field.
    """
    extra = request.model_extra or {}
    for name, harmless in REFUSED.items():
        value = extra.get(name)
        if value is not None and not any(value == item and type(value) is type(item) for item in harmless):
            raise UnsupportedParameter(f"{name} is not supported by this server; leave it out.", param=name)
    options = request.chat_template_kwargs if isinstance(request, ChatRequest) else None
    for name in options.model_extra or {} if options else {}:
        if name in _TEMPLATE_RESERVED:
            raise UnsupportedParameter(
                f"chat_template_kwargs.{name} cannot be set; use the request's own fields.", param="chat_template_kwargs"
            )
