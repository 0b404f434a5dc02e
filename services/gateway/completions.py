"""A checked completion request → jobs for the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.common.errors import InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Head
from services.gateway.beside import SMALL_CHARS, beside
from services.gateway.chat import copies, params_of, usage_options
from services.gateway.completion_answer import CompletionAnswer, CompletionOptions
from services.gateway.constraints import constraint_for
from services.gateway.errors import EmptyArray, InvalidType
from services.gateway.prompt import PromptTail
from services.gateway.sampling import (
    NO_LOGPROBS,
    bad_word_ids,
    kept_tokens,
    num_prompt_logprobs,
    priority_of,
    room_for_answer,
    sampling_params,
)
from services.gateway.schemas import CompletionRequest
from services.gateway.services import Job, Scoring
from services.gateway.worker_client import Language

_MAX_CHOICES = 1024


async def prepare(body: CompletionRequest, info: pb.InfoResponse, language: Language, request_id: str) -> Job:
    """Encodes and maps a request.

    Args:
        body: the checked request.
        info: what the worker serves.
        language: tokenizer and template.
        request_id: our id; names the jobs in the worker and the answer.

    Raises:
        InvalidRequest: names the field at fault.
    """
    given, count = list(_prompts(body)), body.n or 1
    if len(given) * count > _MAX_CHOICES:
        raise InvalidRequest(f"{len(given)} prompts with n={count} are more than {_MAX_CHOICES} choices.", param="prompt")
    if body.truncate_prompt_tokens is None:
        # Of all, before the first of them is encoded.
        for _, prompt in given:
            language.tokenizer.check_size(len(prompt) if isinstance(prompt, str) else 0, "prompt")
    prompts = [await _token_ids(prompt, path, body, info, language) for path, prompt in given]
    constrained = await constraint_for(body, None, tail=PromptTail.CONTENT, language=language, supported=info.supports_grammar)
    prompt_top = num_prompt_logprobs(body)
    bad_words = await bad_word_ids(body.bad_words, language.tokenizer)
    requests: list[pb.GenerateRequest | Scoring] = []
    for token_ids in prompts:
        base = pb.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            grammar=constrained.grammar if constrained is not None else None,
            priority=priority_of(body.priority),
            prompt_logprobs=_echoes_logprobs(body),
            prompt_top=prompt_top or 0,
        )
        if body.max_tokens == 0:
            requests += _scorings(body, base, language, count, len(requests))
        else:
            generations = _generations(body, base, info, bad_words, count, len(requests))
            # Enough for all choices of the prompt: its own log-probabilities do not depend on what follows.
            generations[0].prompt_logprobs |= prompt_top is not None
            requests += generations
    options = CompletionOptions(
        usage_options(body),
        body.logprobs,
        bool(body.return_tokens_as_token_ids),
        body.prompt_logprobs,
        frozenset() if body.skip_special_tokens is False else language.tokenizer.special_ids,
        tuple(await _texts(body, prompts, language)) if body.echo else (),
        tuple(prompts) if body.return_token_ids else (),
    )
    answer = CompletionAnswer(Head.of("cmpl", request_id, info), [len(ids) for ids in prompts], count, options)
    return Job(requests, answer, params_of(constrained, "max_tokens"))


def _echoes_logprobs(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.logprobs is not None


def _generations(
    body: CompletionRequest,
    base: pb.GenerateRequest,
    info: pb.InfoResponse,
    bad_words: list[pb.TokenSequence],
    count: int,
    first: int,
) -> list[pb.GenerateRequest]:
    """The generations of one prompt, `first` being the position of the first one in the request."""
    sampling = sampling_params(
        body,
        asked_max=body.max_tokens,
        max_param="max_tokens",
        room=room_for_answer(len(base.prompt_token_ids), info.max_context, "prompt"),
        vocab_size=info.vocab_size,
        logprobs=NO_LOGPROBS if body.logprobs is None else body.logprobs,
        bad_words=bad_words,
    )
    return copies(base, sampling, count, first)


def _scorings(body: CompletionRequest, base: pb.GenerateRequest, language: Language, count: int, first: int) -> list[Scoring]:
    """The scoring of one prompt: max_tokens 0 with echo or prompt_logprobs.

    Raises:
        InvalidRequest: there is nothing to answer.
    """
    if not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens 0 needs echo: true or prompt_logprobs; otherwise there is nothing to answer.", param="max_tokens")
    token_ids = list(base.prompt_token_ids)
    start = pb.Token(id=token_ids[0], piece=language.tokenizer.piece(token_ids[0]))
    requests = [
        pb.ScoreRequest(
            request_id=f"{base.request_id}-{choice}" if choice else base.request_id,
            token_ids=token_ids,
            first_scored=1,
            top=max(body.logprobs or 0, body.prompt_logprobs or 0),
        )
        for choice in range(first, first + count)
    ]
    return [Scoring(request, start) for request in requests]


def _prompts(body: CompletionRequest) -> Iterator[tuple[str, Any]]:
    """Each prompt with its path: a text, a list of texts, token ids, or lists of token ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        for index, item in enumerate(prompt):
            if type(item) is not type(prompt[0]):
                raise InvalidType(f"prompt[{index}] must be {_KINDS[type(prompt[0])]}, as prompt[0] is.", param="prompt")
            yield f"prompt[{index}]", item
    else:
        yield "prompt", prompt


_KINDS: dict[type, str] = {str: "a string", list: "a list of token ids"}


async def _token_ids(prompt: Any, path: str, body: CompletionRequest, info: pb.InfoResponse, language: Language) -> list[int]:
    """One prompt: text, in which control tokens count as such, or token ids."""
    kept = kept_tokens(body, info.max_context, body.max_tokens)
    if isinstance(prompt, str):
        add = body.add_special_tokens is not False
        if kept is not None and language.tokenizer.most_bytes:
            # Of a text that is longer than any context only the end counts, with room for the first token to be cut elsewhere.
            prompt = prompt[-(language.tokenizer.most_bytes - 1) :]
        encode = language.tokenizer.encode_raw
        small = len(prompt) < SMALL_CHARS
        if small:
            ids = encode(prompt, add_special_tokens=add)
        else:
            ids = await beside(encode, prompt, add_special_tokens=add, must_fit=kept is None)
    else:
        prompt = prompt if kept is None else prompt[-kept:]
        if len(prompt) > info.max_context:  # before each of what may be millions of ids is looked at
            room_for_answer(len(prompt), info.max_context, "prompt")
        for index, token_id in enumerate(prompt):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidType(f"{path}[{index}] must be a token id.", param="prompt")
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(f"{path}[{index}] is {token_id}; this model's ids are 0 to {info.vocab_size - 1}.", param="prompt")
        ids = list(prompt)
    if not ids:
        raise EmptyArray(f"{path} must have at least one token.", param="prompt")
    return ids if kept is None else ids[-kept:]


async def _texts(body: CompletionRequest, prompts: list[list[int]], language: Language) -> list[str]:
    """What `echo` repeats: the client's own text, or the text of token ids: the client's, or what was kept of its text."""
    whole = body.truncate_prompt_tokens is None
    given = [prompt for _, prompt in _prompts(body)]
    return [
        prompt if isinstance(prompt, str) and whole else await beside(language.tokenizer.decode, ids)
        for prompt, ids in zip(given, prompts, strict=True)
    ]
