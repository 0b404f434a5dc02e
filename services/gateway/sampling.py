"""Request fields → the worker's sampling parameters."""

from __future__ import annotations

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.schemas import SamplingFields

NO_LOGPROBS = -1
# 2^64 over the golden ratio: seeds of neighbouring choices are far apart, and seed 5 has no choice in common with seed 6.
_SEED_STEP = 0x9E3779B97F4A7C15


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


def for_choice(params: pb.SamplingParams, choice: int) -> pb.SamplingParams:
    """The parameters of one of several choices: each draws its own tokens, and the same ones for the same seed."""
    own = pb.SamplingParams()
    own.CopyFrom(params)
    if choice and params.HasField("seed"):
        own.seed = (params.seed + choice * _SEED_STEP) % 2**64
    return own


def priority_of(priority: int | None) -> pb.Priority:
    """vLLM's number, where less comes first, as one of the worker's bands."""
    if not priority:
        return pb.PRIORITY_NORMAL
    return pb.PRIORITY_HIGH if priority < 0 else pb.PRIORITY_BATCH


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(f"{param} has the token id {token_id}; this model's ids are below {vocab_size}.", param=param)
