"""A checked /generate request → jobs for the worker: those of /v1/completions, with parameters for all prompts or for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import completions
from services.gateway.accept import Ready
from services.gateway.answers import weight_version
from services.gateway.completion_answer import CompletionAnswer
from services.gateway.generate_answer import GenerateAnswer, GenerateOptions
from services.gateway.native_schemas import MAX_NEW_TOKENS, GenerateBody, NativeSampling
from services.gateway.schemas import CompletionRequest, parse, renaming
from services.gateway.services import Job, Scoring

# Names of sampling_params → those of /v1/completions.
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
# What may be one value for all prompts, or a list with one for each.
_PER_PROMPT = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
_MAX_CHOICES = 1024


@dataclass(frozen=True)
class _Part:
    """Prompts that are asked the same.

    Attributes:
        prompt: of /v1/completions; a list also for a single one of several.
        prompt_path: where the client wrote it.
        params_path: where its sampling parameters stand.
        first: logprob_start_len.
    """

    prompt: Any
    prompt_path: str
    sampling: NativeSampling
    params_path: str
    rid: str | None
    logprobs: bool
    first: int
    top: int


async def generate_job(body: GenerateBody, ready: Ready, request_id: str) -> Job:
    """All prompts' jobs, with one answer in SGLang's shape.

    Raises:
        InvalidRequest: names the field as the client wrote it.
    """
    parts = _parts(body)
    counts = {part.sampling.n or 1 for part in parts}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params: n must be the same for every prompt.", param="sampling_params")
    choices = sum(len(part.prompt) if isinstance(part.prompt, list) and _is_batch(body) else 1 for part in parts) * max(counts)
    if choices > _MAX_CHOICES:
        raise InvalidRequest(f"{choices} choices are more than {_MAX_CHOICES}.", param=_prompt_name(body))
    made = [await _prepared(part, body, ready, request_id) for part in parts]
    requests = [request for job in made for request in job.requests]
    lengths: list[int] = []
    options: list[GenerateOptions] = []
    ids: list[str] = []
    for part, job in zip(parts, made, strict=True):
        assert isinstance(job.answer, CompletionAnswer)
        lengths += job.answer.prompt_lengths
        options += [_options(part, body, ready)] * len(job.requests)
        ids += _ids(part.rid, len(job.requests))
    for index, request in enumerate(requests):
        _inner(request).request_id = f"{request_id}-{index}" if index else request_id
    alone = len(requests) == 1 and not _is_batch(body)
    own = [given or (request_id if len(requests) == 1 else f"{request_id}-{index}") for index, given in enumerate(ids)]
    params = dict(made[0].params) | {"max_tokens": "sampling_params", "grammar": "sampling_params"}
    return Job(requests, GenerateAnswer(own, lengths, options, weight_version(ready.info), alone=alone), params)


def _parts(body: GenerateBody) -> list[_Part]:
    """The prompts, together where all are asked the same.

    Raises:
        InvalidRequest: a list has not one entry for each prompt.
    """
    name = _prompt_name(body)
    prompts = getattr(body, name)
    given = {field: value for field in _PER_PROMPT if (value := getattr(body, field)) is not None}
    lists = {field: value for field, value in given.items() if isinstance(value, list)}
    for field, value in lists.items():
        if not _is_batch(body):
            raise InvalidRequest(f"{field} is a list, but {name} is one prompt; send a list of prompts.", param=field)
        if len(value) != len(prompts):
            raise InvalidRequest(f"{field} has {len(value)} entries, but {name} has {len(prompts)}; send one for each.", param=field)
    if not lists:
        return [_part(given, prompts, name, "sampling_params")]
    return [
        _part(
            {field: value[index] if field in lists else value for field, value in given.items()},
            [prompt],
            f"{name}[{index}]",
            f"sampling_params[{index}]" if "sampling_params" in lists else "sampling_params",
        )
        for index, prompt in enumerate(prompts)
    ]


def _part(given: dict[str, Any], prompt: Any, prompt_path: str, params_path: str) -> _Part:
    first = given.get("logprob_start_len")
    return _Part(
        prompt,
        prompt_path,
        given.get("sampling_params") or NativeSampling(),
        params_path,
        given.get("rid"),
        bool(given.get("return_logprob")),
        -1 if first is None else first,
        given.get("top_logprobs_num") or 0,
    )


async def _prepared(part: _Part, body: GenerateBody, ready: Ready, request_id: str) -> Job:
    sampling = part.sampling
    known = sampling.model_dump(include=set(NativeSampling.model_fields), exclude_none=True)
    fields = {"max_tokens": MAX_NEW_TOKENS} | {NAMES.get(name, name): value for name, value in known.items()}
    scored = part.logprobs and part.first >= 0
    if sampling.max_new_tokens == 0 and not scored:
        raise InvalidRequest(
            f"{part.params_path}.max_new_tokens 0 needs return_logprob and logprob_start_len 0 or more.", param=part.params_path
        )
    name = _prompt_name(body)
    names = dict.fromkeys(fields, part.params_path) | {"prompt": name, "logprobs": "top_logprobs_num"}
    words = {NAMES.get(native, native): f"{part.params_path}.{native}" for native in sorted(NativeSampling.model_fields, key=len)}
    with renaming(names, {("prompt[0]" if part.prompt_path != name else "prompt"): part.prompt_path} | words):
        request = parse(
            CompletionRequest,
            {
                **fields,
                "model": ready.info.model_name,
                "prompt": part.prompt,
                "logprobs": part.top if part.logprobs else None,
                "echo": scored,
                "priority": body.priority,
            },
        )
        return await completions.prepare(request, ready.info, ready.language, request_id)


def _options(part: _Part, body: GenerateBody, ready: Ready) -> GenerateOptions:
    hidden = frozenset[int]() if part.sampling.skip_special_tokens is False else ready.language.tokenizer.special_ids
    return GenerateOptions(hidden, part.logprobs, part.top, part.first, bool(body.return_text_in_logprobs))


def _ids(rid: str | None, count: int) -> Sequence[str]:
    """The client's name of each choice; empty where it gave none."""
    if rid is None:
        return [""] * count
    return [rid] if count == 1 else [f"{rid}-{index}" for index in range(count)]


def _inner(request: pb.GenerateRequest | Scoring) -> pb.GenerateRequest | pb.ScoreRequest:
    return request.request if isinstance(request, Scoring) else request


def _prompt_name(body: GenerateBody) -> str:
    return "input_ids" if body.text is None else "text"


def _is_batch(body: GenerateBody) -> bool:
    return isinstance(body.text, list) or (body.input_ids is not None and isinstance(body.input_ids[0], list))
