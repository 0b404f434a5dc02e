"""The checkpoint's tokenizer as the gateway needs it: trusted text with control tokens, everything else without.

A client must not be able to write control tokens. So text that comes from a client is *marked* before it meets the chat template:
every character that could begin or end a control token is exchanged for a lone surrogate, a code point that valid text never
holds. Templates may strip, test, join or JSON-encode marked text, nothing changes length or order; after rendering, control tokens
are found in what is left of the template alone, the marks are taken back, and the pieces between control tokens are encoded by a
tokenizer that knows no control tokens at all. On text without control tokens this gives exactly the ids of the plain way, because
the plain way cuts at control tokens first, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from services.common.errors import CheckpointError, ContextLengthExceeded

_FIRST_MARK = 0xDC00
_LAST_MARK = 0xDFFF
# Texts are marked in pieces: one call for megabytes would keep other threads waiting.
_PIECE_CHARS = 16 * 1024
# Characters that a token of a long text has at most, by far: a longer prompt is looked at piece by piece before it is encoded.
_USUAL_CHARS = 8
# How much shorter Unicode normalisation can make a text, in bytes.
_NORMALISED = 3


class PromptTokenizer:
    """Encodes prompts.

    Args:
        tokenizer_json: the bytes of the checkpoint's tokenizer.json.

    Raises:
        CheckpointError: the file cannot be read or has a kind of control token that cannot be kept apart from text.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            document: dict[str, Any] = json.loads(tokenizer_json)
            added: list[dict[str, Any]] = document.get("added_tokens") or []
            self._full = Tokenizer.from_str(tokenizer_json.decode())
            self._text_only = Tokenizer.from_str(_without_control_tokens(document, added))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        except Exception as error:  # the tokenizers library raises nothing more precise
            raise CheckpointError(f"tokenizer.json is refused by the tokenizers library: {error}") from error
        for token in added:
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                raise CheckpointError(
                    f"tokenizer.json: control token {token['content']!r} swallows neighbouring text (lstrip, rstrip or "
                    "single_word); such tokens cannot be told from text safely"
                )
        self.control_ids: dict[str, int] = {token["content"]: int(token["id"]) for token in added}
        self._control_names = frozenset(self.control_ids.values())
        self.special_ids: frozenset[int] = frozenset(int(token["id"]) for token in added if token.get("special"))
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._mark, self._unmark = _mark_tables(self.control_ids)
        pieces = (self._full.id_to_token(number) or "" for number in range(self.vocab_size))
        self.longest_bytes = max(_num_bytes(name) for name in pieces) * (_NORMALISED if document.get("normalizer") else 1)
        self._context = 0

    def serve(self, context: int) -> None:
        """From now on texts that no `context` tokens can hold are refused before they are encoded."""
        self._context = context

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest text that could fit the context; 0 for any."""
        return self._context * self.longest_bytes

    def check_size(self, size: int, param: str) -> None:
        """Refuses what cannot fit, whatever it says.

        Args:
            size: of a text, or of several that make one prompt, in characters or bytes.
            param: the request's field.

        Raises:
            ContextLengthExceeded: names both sizes.
        """
        if 0 < self.most_bytes < size:
            raise ContextLengthExceeded(
                f"The prompt is too long: this model's maximum context length is {self._context} tokens of at most {self.longest_bytes} "
                f"bytes, {self.most_bytes} bytes in all, but the prompt has {size} or more. Shorten it.",
                param=param,
            )

    def mark(self, text: str) -> str:
        """`text` in a form that no template and no encoder takes for a control token."""
        return _translated(text, self._mark)

    def unmark(self, text: str) -> str:
        """The text that `mark` was given."""
        return _translated(text, self._unmark)

    def mark_tree(self, value: Any) -> Any:
        """A JSON value with every string in it marked, keys included."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark_tree(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_tree(item) for item in value]
        return value

    def encode_rendered(self, rendered: str, *, must_fit: bool = False) -> list[int]:
        """Token ids of a rendered template: control tokens where the template wrote them, marked text as plain text.

        Args:
            rendered: what the template made.
            must_fit: more than the context is of no use: see `_check_beginning`.
        """
        if must_fit and self._is_long(rendered):
            texts = (self.unmark(text) for token, text in self._cut(rendered) if token is None)
            self._check_beginning(self._text_only, texts, "messages")
        ids: list[int] = []
        for token, text in self._cut(rendered):
            if token is not None:
                ids.append(token)
            elif text:
                ids.extend(_encode(self._text_only, self.unmark(text), add_special_tokens=False))
        return ids

    def encode_raw(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        """Token ids of a text whose author may use control tokens: the prompt of /v1/completions."""
        if must_fit and self._is_long(text):
            self._check_beginning(self._full, [text], "prompt")
        return _encode(self._full, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens spelled out. As in `_encode`, the call for batches lets others work meanwhile."""
        return str(self._full.decode_batch([list(token_ids)], skip_special_tokens=False)[0])

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, of a byte-level vocabulary exactly."""
        name = self._full.id_to_token(token_id)
        if name is None or token_id in self._control_names:
            return (name or "").encode()
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in name)
        except KeyError:
            return str(self._full.decode([token_id])).encode()

    def _is_long(self, text: str) -> bool:
        return 0 < self._context * _USUAL_CHARS < len(text)

    def _check_beginning(self, tokenizer: Tokenizer, texts: Iterable[str], param: str) -> None:
        """Refuses a prompt whose beginning has twice as many tokens as fit, before all of it is encoded: seconds for a megabyte.

        Cut texts have more tokens than whole ones, a few at each cut.

        Raises:
            ContextLengthExceeded: names both numbers.
        """
        count = 0
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARS):
                piece = text[start : start + _PIECE_CHARS]
                count += len(tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
                if count > 2 * self._context:
                    raise ContextLengthExceeded(
                        f"The prompt is too long: this model's maximum context length is {self._context} tokens, but the beginning of the "
                        f"prompt alone has {count}. Shorten it.",
                        param=param,
                    )

    def _cut(self, rendered: str) -> Iterator[tuple[int | None, str]]:
        position = 0
        for match in self._control.finditer(rendered):
            yield None, rendered[position : match.start()]
            yield self.control_ids[match.group()], ""
            position = match.end()
        yield None, rendered[position:]


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of one text. The call for batches lets go of the GIL while it works, the one for a single text does not: a prompt of a
    megabyte would stop every stream of the gateway for seconds."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def text_size(value: Any) -> int:
    """Characters of all strings in a JSON value: no more than their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(text_size, value))
    return 0


def _translated(text: str, table: dict[int, int]) -> str:
    if len(text) <= _PIECE_CHARS:
        return text.translate(table)
    return "".join([text[i : i + _PIECE_CHARS].translate(table) for i in range(0, len(text), _PIECE_CHARS)])


def _num_bytes(name: str) -> int:
    """Bytes of the text that a vocabulary's entry stands for, at most."""
    return len(name) if all(character in _BYTE_OF_CHARACTER for character in name) else len(name.encode())


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _without_control_tokens(document: dict[str, Any], added: list[dict[str, Any]]) -> str:
    """The same tokenizer with nothing but its text model: no control tokens, no prefix or suffix of its own."""
    names = {token["content"] for token in added}
    model = dict(document["model"])
    if isinstance(model.get("vocab"), dict):
        # Some files list control tokens in the text vocabulary as well.
        model["vocab"] = {piece: number for piece, number in model["vocab"].items() if piece not in names}
    return json.dumps({**document, "model": model, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None})


def _mark_tables(control_ids: dict[str, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Character → mark and back, for every character that a control token can begin or end with."""
    first = {token[0] for token in control_ids if token}
    last = {token[-1] for token in control_ids if token and not token[-1].isalnum()}
    characters = sorted(first | last)
    if len(characters) > _LAST_MARK - _FIRST_MARK + 1:
        raise CheckpointError("tokenizer.json has control tokens with too many different first characters")
    mark = {ord(character): _FIRST_MARK + number for number, character in enumerate(characters)}
    return mark, {number: character for character, number in mark.items()}
