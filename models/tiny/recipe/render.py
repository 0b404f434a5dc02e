"""Chat template rendering for the recipe: the same text that the gateway and transformers render."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from tokenizers import Tokenizer

from .config import SPECIAL_IDS

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
THINK_END = "</think>"
"""Appended to a rendered generation prompt to turn thinking off."""

Message = dict[str, Any]
Tool = dict[str, Any]


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter would escape <, > and & and sort the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@lru_cache(maxsize=1)
def _template() -> Template:
    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    env.filters["tojson"] = _tojson
    return env.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))


def render_chat(messages: list[Message], tools: list[Tool] | None = None, *, add_generation_prompt: bool = False, **options: Any) -> str:
    """Render a conversation in the GLM-5.3 chat format.

    Options are template variables: `reasoning_effort` ("low", "high", else maximum) and `clear_thinking`.
    """
    return _template().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **options)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """Return the checkpoint's tokenizer."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """Encode rendered text; special tokens written in it become their ids."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def encode_training(messages: list[Message], tools: list[Tool] | None, **options: Any) -> tuple[list[int], list[bool]]:
    """Encode a conversation for training.

    Returns (ids, learn): learn[i] is True where ids[i] is a token that the model itself must produce in the
    conversation's trained turns: everything after `<|assistant|><think>` up to and including the token that ends
    the turn (`<|observation|>` after tool calls, else `<|user|>`). A turn with a true key "given" is context only. An
    empty reasoning is given as well when the turn has the key "no_think": serving then puts `</think>` in the prompt.
    """
    ids = encode(render_chat(messages, tools, **options))
    final_calls = bool(messages[-1].get("tool_calls"))
    ids.append(SPECIAL_IDS["<|observation|>" if final_calls else "<|user|>"])
    assistant, think, think_end = SPECIAL_IDS["<|assistant|>"], SPECIAL_IDS["<think>"], SPECIAL_IDS[THINK_END]
    ends = {SPECIAL_IDS["<|user|>"], SPECIAL_IDS["<|observation|>"]}
    system = SPECIAL_IDS["<|system|>"]
    turns = iter(m for m in messages if m["role"] == "assistant")
    learn = [False] * len(ids)
    on = False
    for i, token in enumerate(ids):
        if token == assistant:
            turn = next(turns)
            on = not turn.get("given")
            continue
        if on and not (token == think and ids[i - 1] == assistant) and token != system:
            given_end = token == think_end and ids[i - 1] == think and turn.get("no_think")
            learn[i] = not given_end
        if token in ends or token == system:
            on = False
    return ids, learn
