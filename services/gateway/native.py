"""SGLang-shaped endpoints, and what vLLM calls by the same names: generate, tokenize, information, a real probe."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.errors import InvalidRequest, NotReady, UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.accept import read_body, ready_for, services_of
from services.gateway.answers import weight_version
from services.gateway.beside import beside, by_size, prepared
from services.gateway.chat import render
from services.gateway.generate_answer import GenerateAnswer, GenerateOptions
from services.gateway.generate_jobs import NAMES, generate_job
from services.gateway.idempotency import once
from services.gateway.json_response import JsonResponse
from services.gateway.native_schemas import DetokenizeBody, GenerateBody, NativeSampling, TokenizeBody
from services.gateway.refusals import OF_GENERATE, REFUSED, refuse_fields, refuse_other_names, refuse_unsupported
from services.gateway.run import complete, respond
from services.gateway.schemas import ChatRequest, SamplingFields, parse
from services.gateway.services import Job

router = APIRouter()

# Of /tokenize and /detokenize: texts or lists of ids in one request, and ids that every model's users may send.
_MAX_LISTS = 4096
_LEAST_IDS = 65_536

_UNSUPPORTED = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
)
# A server that gave a token so lately needs no probe.
_RECENT_S = 10.0
_PROBE_TIMEOUT_S = 20.0


@router.post("/generate")
async def generate(request: Request) -> Response:
    """A continuation of a text or of token ids; with `stream` each event has the whole text so far."""
    raw = await read_body(request)

    async def answer() -> Response:
        body = await by_size(parse, GenerateBody, raw)
        _refuse(body)
        ready = await ready_for(request, None)
        job = await prepared(generate_job, body, ready, request.state.request_id)
        return await respond(request, services_of(request), job, stream=bool(body.stream))

    return await once(request, raw, answer)


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a rendered conversation."""
    raw = await read_body(request)
    body = await by_size(parse, TokenizeBody, raw)
    ready = await ready_for(request, body.model)
    tokenizer = ready.language.tokenizer
    tokens: list[Any]
    count: int | list[int]
    if body.messages is not None:
        chat = await by_size(parse, ChatRequest, raw | {"model": ready.info.model_name})
        refuse_unsupported(chat)
        prompt = await prepared(render, chat, ready.language, services_of(request).settings)
        tokens, count = prompt.token_ids, len(prompt.token_ids)
    else:
        add = body.add_special_tokens is not False
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        if len(texts) > _MAX_LISTS:
            raise InvalidRequest(f"prompt has {len(texts)} texts; this server takes {_MAX_LISTS}.", param="prompt")
        tokenizer.check_size(sum(map(len, texts)), "prompt")
        found = await beside(lambda: [tokenizer.encode_raw(text, add_special_tokens=add) for text in texts])
        single = isinstance(body.prompt, str)
        tokens, count = (found[0], len(found[0])) if single else (found, [len(ids) for ids in found])
    return JsonResponse({"tokens": tokens, "count": count, "max_model_len": ready.info.max_context})


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, under SGLang's name and under vLLM's."""
    raw = await read_body(request)
    ready = await ready_for(request, None)
    _check_count(raw.get("tokens"), ready.info)
    body = await by_size(parse, DetokenizeBody, raw)
    ready = await ready_for(request, body.model)
    several = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: list[Any] = body.tokens if several else [body.tokens]
    tokenizer = ready.language.tokenizer
    hidden = tokenizer.special_ids if body.skip_special_tokens else frozenset[int]()
    vocab_size = ready.info.vocab_size

    def decode() -> list[str]:
        if (largest := max((max(ids, default=0) for ids in lists), default=0)) >= vocab_size:
            raise InvalidRequest(f"tokens has the id {largest}; this model's ids are below {vocab_size}.", param="tokens")
        return [tokenizer.decode([token_id for token_id in ids if token_id not in hidden]) for ids in lists]

    texts = await beside(decode)
    text = texts if several else texts[0]
    return JsonResponse({"text": text, "prompt": text})


def _check_count(tokens: Any, info: pb.InfoResponse) -> None:
    """Refuses what is far more than a context holds before each id is looked at.

    Raises:
        InvalidRequest: names both numbers.
    """
    if not isinstance(tokens, list):
        return
    lists = [ids for ids in tokens[: _MAX_LISTS + 1] if isinstance(ids, list)]
    if len(lists) > _MAX_LISTS:
        raise InvalidRequest(f"tokens has {len(tokens)} lists; this server takes {_MAX_LISTS}.", param="tokens")
    count = sum(map(len, lists)) if lists else len(tokens)
    most = max(_LEAST_IDS, 4 * info.max_context)
    if count > most:
        raise InvalidRequest(f"tokens has {count} ids; this server takes {most} at once.", param="tokens")


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served."""
    info = await services_of(request).watch.named()
    return JSONResponse(
        {
            "model_path": info.model_name,
            "tokenizer_path": info.model_name,
            "is_generation": True,
            "preferred_sampling_params": {"temperature": info.default_temperature, "top_p": info.default_top_p},
            "weight_version": weight_version(info),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "glm5_next",
            "architectures": [info.architecture],
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Settings without secrets, and the worker's facts."""
    services = services_of(request)
    info = await services.watch.known()
    return JSONResponse(
        {
            "version": info.version,
            "served_model_name": info.model_name,
            "architecture": info.architecture,
            "max_total_num_tokens": info.max_context,
            "context_length": info.max_context,
            "max_running_requests": info.max_streams,
            "max_queued_requests": info.max_queued,
            "mode": pb.Mode.Name(info.mode).removeprefix("MODE_").lower().replace("_", "-"),
            "mode_reason": info.mode_reason,
            "device": info.device,
            "device_reason": info.device_reason,
            "kernel_variant": info.kernel_variant,
            "supports_grammar": info.supports_grammar,
            "gateway": {name: value for name, value, _source in services.settings.describe()},
            "internal_states": [{"in_flight": services.traffic.in_flight, "worker": services.watch.state}],
        }
    )


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when the model has just given a token, or gives one now."""
    services = services_of(request)
    services.traffic.check_open()
    info, language = await services.watch.ready()
    if services.traffic.silent_s > _RECENT_S:
        probe = pb.GenerateRequest(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_token_ids=language.tokenizer.encode_raw("a")[:4] or [0],
            sampling=pb.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=-1),
            priority=pb.PRIORITY_HIGH,
            queue_timeout_ms=int(_PROBE_TIMEOUT_S * 1000),
        )
        answer = GenerateAnswer([probe.request_id], [len(probe.prompt_token_ids)], [GenerateOptions()], weight_version(info), alone=True)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await complete(request, services, Job([probe], answer))
        except TimeoutError:
            raise NotReady(f"The model gave no token within {_PROBE_TIMEOUT_S:.0f} s.", retry_after_s=5.0) from None
    return JSONResponse({"status": "ok", "model": info.model_name})


def _refuse(body: GenerateBody) -> None:
    for name in _UNSUPPORTED:
        if (body.model_extra or {}).get(name) not in (None, False, []):
            raise UnsupportedParameter(f"{name} is not supported by this server; leave it out.", param=name)
    for name, value in (body.model_extra or {}).items():
        if name in NativeSampling.model_fields and value is not None and value not in REFUSED.get(name, ()):
            raise UnsupportedParameter(f"{name} belongs into sampling_params.", param=name)
    refuse_fields(body.model_extra)
    refuse_other_names(body.model_extra, OF_GENERATE)
    several = isinstance(body.sampling_params, list)
    for index, sampling in enumerate(body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params]):
        where = f"sampling_params[{index}]" if several else "sampling_params"
        unknown = sampling.model_extra or {} if sampling is not None else {}
        refuse_fields(unknown, where)
        for name in unknown.keys() & SamplingFields.model_fields.keys() - REFUSED.keys():
            if unknown[name] is not None:
                own = next((f"use {native}" for native, ours in NAMES.items() if ours == name), "leave it out")
                raise UnsupportedParameter(f"{where}.{name} is not a name of this API; {own}.", param=where)
