"""Bodies of the SGLang-shaped endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.gateway.formats import FIRST, Body, Int
from services.gateway.mistakes import exactly_one
from services.gateway.schemas import TokenId

_Ids = Annotated[list[TokenId], Field(min_length=1), FIRST]
MAX_NEW_TOKENS = 128
# Of each prompt of one request.
_EACH = Field(max_length=1024, fail_fast=True)
_Rid = Annotated[str, Field(min_length=1, max_length=128)]
_Start = Annotated[Int, Field(ge=-1, le=2**31 - 1)]
_Top = Annotated[Int, Field(ge=0, le=20)]


class NativeSampling(Body):
    """`sampling_params` of /generate; ranges are those of /v1/completions."""

    max_new_tokens: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = MAX_NEW_TOKENS
    min_new_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    no_stop_trim: Any = None
    sampling_seed: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None


class GenerateBody(Body):
    """POST /generate. Of several prompts, what may be a list has one entry for each, or is one value for all."""

    text: str | Annotated[list[str], _EACH] | None = None
    input_ids: _Ids | Annotated[list[_Ids], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], _EACH] | None = None
    rid: _Rid | Annotated[list[_Rid], _EACH] | None = None
    return_logprob: bool | Annotated[list[bool], _EACH] | None = None
    logprob_start_len: _Start | Annotated[list[_Start], _EACH] | None = None
    top_logprobs_num: _Top | Annotated[list[_Top], _EACH] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: Annotated[Int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise exactly_one("text", "input_ids", given=self.text is not None)
        return self


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as for /v1/chat/completions."""

    model: str | None = None
    prompt: str | Annotated[list[str], FIRST] | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise exactly_one("prompt", "messages", given=self.prompt is not None)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST] | Annotated[list[Annotated[list[TokenId], FIRST]], FIRST]
    skip_special_tokens: bool | None = None
