"""The shipped tokenizer and chat template, and token helpers for scripts."""

from __future__ import annotations

import json
from pathlib import Path

from services.gateway.parser import Vocabulary
from services.gateway.prompt import ChatTemplate
from services.gateway.tokenizer import PromptTokenizer

CHECKPOINT = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
TOKENIZER_JSON = (CHECKPOINT / "tokenizer.json").read_bytes()
CHAT_TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text()

TOKENIZER = PromptTokenizer(TOKENIZER_JSON)
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, TOKENIZER)
VOCABULARY = Vocabulary.of(TOKENIZER)
IDS = TOKENIZER.control_ids
NAMES = {number: name for name, number in IDS.items()}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, as byte-level BPE vocabularies spell their pieces."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_character()
_NAMES = {number: name for name, number in json.loads(TOKENIZER_JSON)["model"]["vocab"].items()}


def encode(text: str) -> list[int]:
    """Token ids of a text in which control tokens count as such."""
    return TOKENIZER.encode_raw(text, add_special_tokens=False)


def piece(token_id: int) -> bytes:
    """The bytes of a token."""
    if token_id in NAMES:
        return NAMES[token_id].encode()
    return bytes(_BYTES[character] for character in _NAMES[token_id])


def tokens_of(text: str) -> list[tuple[int, bytes]]:
    """(id, bytes) of every token of a text."""
    return [(token_id, piece(token_id)) for token_id in encode(text)]
