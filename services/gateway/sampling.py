"""Request fields → the worker's sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.beside import beside
from services.gateway.schemas import SamplingFields
from services.gateway.tokenizer import PromptTokenizer

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
            # LiteLLM and agents tell this error from others by the first two phrases, and shorten or choose another model then.
            f"The prompt is too long: this model's maximum context length is {max_context} tokens, but the prompt has {prompt_tokens} and "
            "leaves no room for an answer. Shorten it.",
            param=param,
        )
    return max_context - prompt_tokens


def kept_tokens(request: SamplingFields, max_context: int, asked_max: int | None) -> int | None:
    """How many tokens of a prompt's end `truncate_prompt_tokens` keeps; None for all of them.

    Raises:
        InvalidRequest: it is 0 or larger than the context.
    """
    kept = request.truncate_prompt_tokens
    if kept == -1:
        return max(1, max_context - max(1, asked_max or 1))
    if kept is not None and not 1 <= kept <= max_context:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {kept}; take 1 to {max_context}, or -1 for as many as fit the context beside the answer.",
            param="truncate_prompt_tokens",
        )
    return kept


def num_prompt_logprobs(request: SamplingFields) -> int | None:
    """`prompt_logprobs`, None where they are not asked for.

    Raises:
        InvalidRequest: they are asked for in a stream.
    """
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs come with a whole answer only; leave out stream.", param="prompt_logprobs")
    return request.prompt_logprobs


async def bad_word_ids(words: Sequence[str] | None, tokenizer: PromptTokenizer) -> list[pb.TokenSequence]:
    """The token ids of each word as it may stand in an output: as it is, at the beginning of a line, and after a space."""
    if not words:
        return []
    forms = {form: None for word in words for form in (word, word.lstrip(), " " + word.lstrip()) if form.strip() or form == word}
    found = await beside(lambda: [tokenizer.encode_raw(form, add_special_tokens=False) for form in forms])
    return [pb.TokenSequence(token_ids=ids) for ids in found if ids]


def sampling_params(
    request: SamplingFields,
    *,
    asked_max: int | None,
    max_param: str,
    room: int,
    vocab_size: int,
    logprobs: int,
    bad_words: Sequence[pb.TokenSequence] = (),
) -> pb.SamplingParams:
    """The worker's parameters.

    Args:
        request: a checked body.
        asked_max: the client's limit on new tokens, None for as many as fit.
        max_param: the field that `asked_max` came from.
        room: tokens that still fit the context; a larger `asked_max` is cut to it.
        vocab_size: token ids are below it.
        logprobs: -1 none, 0 the chosen token's, n the n most likely as well.
        bad_words: of `bad_word_ids`.

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
        show_special_tokens=request.skip_special_tokens is False,
        logprobs=logprobs,
        allowed_token_ids=request.allowed_token_ids or [],
        bad_words=bad_words,
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
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
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


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(f"{param} has the token id {token_id}; this model's ids are below {vocab_size}.", param=param)
