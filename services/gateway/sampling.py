"""Request fields → the worker's sampling parameters."""

from __future__ import annotations

import json

from services.common.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.schemas import ResponseFormat, SamplingFields

NO_LOGPROBS = -1


def room_for_answer(prompt_tokens: int, max_context: int, param: str) -> int:
    """Tokens that an answer may have after a prompt.

    Raises:
        ContextLengthExceeded: there is no room for one token; both numbers are in the message.
    """
    if prompt_tokens >= max_context:
        raise ContextLengthExceeded(
            f"This model's context is {max_context} tokens, but the prompt has {prompt_tokens} and leaves no room for an "
            "answer. Shorten it.",
            param=param,
        )
    return max_context - prompt_tokens


def sampling_params(
    request: SamplingFields, *, asked_max: int | None, max_param: str, room: int, vocab_size: int, logprobs: int
) -> pb.SamplingParams:
    """The worker's parameters.

    Args:
        request: a checked body.
        asked_max: the client's limit on new tokens, None for as many as fit.
        max_param: the field that `asked_max` came from.
        room: tokens that still fit the context; a larger `asked_max` is cut to it.
        vocab_size: token ids are below it.
        logprobs: -1 none, 0 the chosen token's, n the n most likely as well.

    Raises:
        InvalidRequest: fields that contradict each other, or token ids outside the vocabulary.
    """
    if asked_max is not None and (request.min_tokens or 0) > asked_max:
        raise InvalidRequest(f"min_tokens ({request.min_tokens}) is larger than {max_param} ({asked_max}).", param="min_tokens")
    max_tokens = room if asked_max is None else min(asked_max, room)
    params = pb.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        logprobs=logprobs,
    )
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        value = getattr(request, name)
        if value is not None:
            setattr(params, name, value)
    # -1 means a random seed to users of vLLM and llama-server; other negative seeds keep their 64 bits.
    if request.seed is not None and request.seed != -1:
        params.seed = request.seed % 2**64
    for key, bias in (request.logit_bias or {}).items():
        params.logit_bias[int(key)] = bias
    _check_ids(list(params.logit_bias), vocab_size, "logit_bias")
    _check_ids(list(params.stop_token_ids), vocab_size, "stop_token_ids")
    return params


def grammar_for(wanted: ResponseFormat | None, supported: bool, after_token_id: int) -> pb.Grammar | None:
    """The grammar that a response format asks for.

    Args:
        wanted: response_format.
        supported: the worker can constrain its output.
        after_token_id: the grammar begins after this token (``</think>``); 0 for at once.

    Raises:
        UnsupportedParameter: the worker cannot constrain; free text must not pretend to be checked JSON.
    """
    if wanted is None or wanted.type == "text":
        return None
    if not supported:
        raise UnsupportedParameter(
            f"response_format {wanted.type} is not supported by this worker; ask for JSON in the prompt instead.",
            param="response_format",
        )
    if wanted.json_schema is None:
        return pb.Grammar(any_json_object=True, after_token_id=after_token_id)
    return pb.Grammar(json_schema=json.dumps(wanted.json_schema.schema_), after_token_id=after_token_id)


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(f"{param} has the token id {token_id}; this model's ids are below {vocab_size}.", param=param)
