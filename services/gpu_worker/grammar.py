"""Constrained output: which tokens may come next so that the whole output follows a grammar.

The engine for grammars is llguidance. It knows the tokenizer's control tokens by their ids, so that a grammar may ask for them
(``<[2547]>`` in Lark) and text never matches them.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from services.common.errors import CheckpointError, InvalidRequest
from services.gpu_worker.grammar_limits import Kind, check_grammar, without_gaps

# Between JSON's tokens may stand one space, or a line break with indentation: a model that is lost must not fill the answer with more.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n[ \t]{0,32})"}
# Clients write grammars: what compiles within these bounds costs milliseconds a token at worst.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_MAX_KEPT = 32
_MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class GrammarSource:
    """What a request asks for.

    Attributes:
        kind: how `text` is written.
        text: the schema, regular expression or Lark grammar; empty for any_json_object.
        after_token_id: the grammar begins after this token; None for at once.
        not_before: while it waits, these tokens and end tokens become `after_token_id`.
    """

    kind: Kind
    text: str
    after_token_id: int | None = None
    not_before: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; `matcher` is a pattern that every request copies."""

    source: GrammarSource
    matcher: Any


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones. Callable from any thread.

    Args:
        tokenizer_json: text of tokenizer.json.
        vocab_size: columns of a row of logits.
        eos_token_ids: end tokens, allowed where the grammar may end.

    Raises:
        CheckpointError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise CheckpointError(f"tokenizer.json cannot be used for grammars: {error}") from error
        self._kept: collections.OrderedDict[tuple[str, str], Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """A grammar ready for use.

        Raises:
            InvalidRequest: it is not valid, not supported or too large; the message says where.
        """
        key = (source.kind, source.text)
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is not None:
                self._kept.move_to_end(key)
        if matcher is None:
            matcher = self._compile(source)
            with self._lock:
                self._kept[key] = matcher
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return Grammar(source, matcher)

    def _compile(self, source: GrammarSource) -> Any:
        check_grammar(source.kind, source.text)
        matcher = llguidance.LLMatcher(self._tokenizer, _text_of(source), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(source.kind, matcher.get_error())
        # Only the first mask shows that nothing at all can be written.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(source.kind, matcher.get_error())
        return matcher


def _text_of(source: GrammarSource) -> str:
    """The grammar in llguidance's own form."""
    make = llguidance.LLMatcher
    if source.kind == "regex":
        return str(make.grammar_from_regex(source.text))
    if source.kind == "lark":
        # Users of llama.cpp and SGLang write GBNF, which is converted.
        try:
            return str(make.grammar_from_lark(any_to_lark(without_gaps(source.text)) if "::=" in source.text else source.text))
        except Exception as error:  # noqa: BLE001 - the converter raises whatever its parser meets
            raise _refusal(source.kind, str(error) or type(error).__name__) from None
    schema = '{"type": "object"}' if source.kind == "any_json_object" else source.text
    try:
        return str(make.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS))
    except ValueError as error:
        raise _refusal(source.kind, str(error)) from None


def _refusal(kind: str, reason: str) -> InvalidRequest:
    words = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar", "any_json_object": "JSON object"}
    return InvalidRequest(f"The {words[kind]} cannot be used to constrain the output: {_in_words(reason)}", param="grammar")


# What the library says of itself, and what it means to somebody who sent a schema.
_ITS_WORDS = (
    (re.compile(r"\n?<backtrace>.*", re.DOTALL), ""),
    (re.compile(r"^panic: .*", re.DOTALL), "it is too large"),
    (re.compile(r"\n +\d+ \| .*", re.DOTALL), ""),
    (re.compile(r"<non-verbose/>"), ""),
    (re.compile(r"^(at \d+\(\d+\): )?failed to compile JSON schema: "), ""),
    (re.compile(r"Unimplemented keys: "), "these keywords cannot be enforced: "),
    (re.compile(r"Unsatisfiable schema: "), "no value satisfies it: "),
    (re.compile(r"^NoExtension(Bias)?\s*$"), "nothing can be written under it"),
    (
        re.compile(r"^Parser Error: Current row has (\d+) items; max is (\d+).*", re.DOTALL),
        r"it has \1 ways to go on, of \2 at most",
    ),
)


def _in_words(reason: str) -> str:
    """The library's reason without its own terms and without the grammar that it repeats."""
    if "initial_lexer_fuel" in reason:
        return "its expressions are too complex"
    for pattern, words in _ITS_WORDS:
        reason = pattern.sub(words, reason.strip())
    return reason[:_MAX_REASON_CHARS].strip()


class Constraint:
    """One request's way through its grammar; used by the engine's thread only.

    Args:
        grammar: compiled; not changed.
        eos_token_ids: end tokens.
    """

    def __init__(self, grammar: Grammar, eos_token_ids: frozenset[int]) -> None:
        self._after = grammar.source.after_token_id
        self._replaced = grammar.source.not_before | eos_token_ids
        self._waiting = self._after is not None
        self._matcher = grammar.matcher.deep_copy()

    @property
    def complete(self) -> bool:
        """True when nothing can follow any more."""
        return not self._waiting and bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """bool [vocab_size]: the tokens that may come next; None while the grammar waits for its beginning.

        Raises:
            InvalidRequest: the grammar has become too complex to follow.
        """
        if self._waiting:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)

    def instead_of(self, token: int) -> int:
        """What comes in place of a chosen token: while waiting, an end becomes the token that the grammar waits for."""
        return self._after if self._waiting and self._after is not None and token in self._replaced else token

    def observe(self, token: int) -> None:
        """Takes note of the token that came.

        Raises:
            InvalidRequest: as `allowed`.
        """
        if self._waiting:
            self._waiting = token != self._after
            return
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _in_words(self._matcher.get_error())
            raise InvalidRequest(f"The grammar cannot be followed any further: {reason}", param="grammar")
