"""A checked completion request → a job for the worker."""

from __future__ import annotations

import asyncio
from typing import Any

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Head
from services.gateway.chat import usage_options
from services.gateway.completion_answer import CompletionAnswer, CompletionOptions
from services.gateway.errors import EmptyArray, InvalidType
from services.gateway.sampling import NO_LOGPROBS, grammar_for, room_for_answer, sampling_params
from services.gateway.schemas import CompletionRequest
from services.gateway.services import Job
from services.gateway.worker_client import Language


async def prepare(body: CompletionRequest, info: pb.InfoResponse, language: Language, request_id: str) -> Job:
    """Encodes and maps a request.

    Args:
        body: the checked request.
        info: what the worker serves.
        language: tokenizer and template.
        request_id: our id; names the job in the worker and the answer.

    Raises:
        InvalidRequest: names the field at fault.
    """
    token_ids = await _token_ids(body, info, language)
    room = room_for_answer(len(token_ids), info.max_context, "prompt")
    request = pb.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=sampling_params(
            body,
            asked_max=body.max_tokens,
            max_param="max_tokens",
            room=room,
            vocab_size=info.vocab_size,
            logprobs=NO_LOGPROBS if body.logprobs is None else body.logprobs,
        ),
        grammar=grammar_for(body.response_format, info.supports_grammar, 0),
    )
    answer = CompletionAnswer(
        Head.of("cmpl", request_id, info),
        [len(token_ids)],
        1,
        CompletionOptions(
            usage_options(body),
            body.logprobs is not None,
            frozenset() if body.skip_special_tokens is False else language.tokenizer.special_ids,
        ),
    )
    return Job([request], answer)


async def _token_ids(body: CompletionRequest, info: pb.InfoResponse, language: Language) -> list[int]:
    """The prompt: text, in which control tokens count as such, or token ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise UnsupportedParameter("prompt: this server takes one prompt a request.", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        add = body.add_special_tokens is not False
        ids = await asyncio.to_thread(language.tokenizer.encode_raw, prompt, add_special_tokens=add)
    else:
        for index, token_id in enumerate(prompt):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidType(f"prompt[{index}] must be a token id.", param="prompt")
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(f"prompt[{index}] is {token_id}; this model's ids are 0 to {info.vocab_size - 1}.", param="prompt")
        ids = list(prompt)
    if not ids:
        raise EmptyArray("prompt must have at least one token.", param="prompt")
    return ids
