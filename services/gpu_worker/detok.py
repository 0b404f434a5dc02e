"""Tokens to bytes, exactly, for byte-level BPE tokenizers.

Bytes, not text: a character may be split over tokens, and putting characters together is the gateway's job.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Self

from services.common.errors import CheckpointError


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes a byte as one character: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


class TokenTable:
    """The bytes of every token id.

    Args:
        pieces: bytes by token id; ids that no token has are empty.
        added: ids of the tokenizer's added tokens (control tokens and tags).
        special: those of them whose text is not shown unless somebody asks for it (control tokens).
    """

    def __init__(self, pieces: list[bytes], added: frozenset[int], special: frozenset[int] = frozenset()) -> None:
        self.pieces = pieces
        self.added = added
        self.special = special

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def from_file(cls, path: pathlib.Path, vocab_size: int) -> Self:
        """Reads tokenizer.json.

        Raises:
            CheckpointError: missing, not byte-level BPE, or with ids beyond `vocab_size`.
        """
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        try:
            return cls._of(document, path, vocab_size)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} does not have the structure of a tokenizer.json: {type(error).__name__}: {error}") from None

    @classmethod
    def _of(cls, document: dict[str, Any], path: pathlib.Path, vocab_size: int) -> Self:
        model = document.get("model") or {}
        if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(document.get("decoder")):
            raise CheckpointError(f"{path} is not a byte-level BPE tokenizer: its tokens have no exact bytes")
        table = _byte_of_char()
        pieces = [b""] * vocab_size
        added = {int(token["id"]): str(token["content"]) for token in document.get("added_tokens", [])}
        ids = [*added, *model["vocab"].values()]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise CheckpointError(f"{path} has token ids beyond the model's vocabulary of {vocab_size}")
        for text, token_id in model["vocab"].items():
            if token_id in added:
                continue
            if (strange := set(text) - table.keys()) != set():
                raise CheckpointError(f"{path} has a token with a character {min(strange)!r} that stands for no byte")
            pieces[token_id] = bytes(table[char] for char in text)
        for token_id, text in added.items():
            pieces[token_id] = text.encode()
        special = (int(token["id"]) for token in document.get("added_tokens", []) if token.get("special"))
        return cls(pieces, frozenset(added), frozenset(special))
