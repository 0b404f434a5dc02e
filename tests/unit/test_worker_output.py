"""Stop strings, stop tokens and lengths; exact bytes of tokens."""

from __future__ import annotations

import itertools
import json
import pathlib
import random

import pytest
from tokenizers import Tokenizer

from services.common.errors import CheckpointError
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.output import OutputStream, StopMatcher
from services.gpu_worker.request import FinishReason, OutToken, SamplingParams
from tests.support.random_checkpoint import TINY

EOS = 300
TABLE = TokenTable([bytes([i % 256]) for i in range(300)] + [b"<|end|>"], frozenset({EOS}))


def split(text: bytes, borders: tuple[int, ...]) -> list[bytes]:
    return [text[a:b] for a, b in itertools.pairwise((0, *borders, len(text)))]


def run(pieces: list[bytes], stops: tuple[bytes, ...], keep: bool = False) -> tuple[bytes, bytes | None, list[bytes]]:
    """(text, stop string, text after each push)."""
    matcher, out, seen = StopMatcher(stops, keep_stop=keep), b"", []
    for i, piece in enumerate(pieces):
        tokens, stop = matcher.push(OutToken(i, piece))
        out += b"".join(token.piece for token in tokens)
        seen.append(out)
        if stop is not None:
            return out, stop, seen
    return out + b"".join(token.piece for token in matcher.flush()), None, seen


@pytest.mark.parametrize("text", [b"abXY Zcd", b"ab\nQ: hi", b"XXY Z", b"X Y XY Z!"])
def test_every_split_gives_the_same_text(text: bytes) -> None:
    """However the text is cut into tokens, the output and the stop string are the same."""
    stops = (b"XY Z", b"\nQ:")
    whole = run([text], stops)[:2]
    for count in range(len(text)):
        for borders in itertools.combinations(range(1, len(text)), min(count, 3)):
            assert run(split(text, borders), stops)[:2] == whole


def test_text_before_a_stop_string_is_cut_exactly() -> None:
    """The output ends where the stop string begins, inside a token too; on request it ends where the stop string ends."""
    pieces = [b"Hello wor", b"ld\n", b"Q", b": next"]
    assert run(pieces, (b"\nQ:",))[:2] == (b"Hello world", b"\nQ:")
    assert run(pieces, (b"\nQ:",), keep=True)[:2] == (b"Hello world\nQ:", b"\nQ:")


def test_only_what_can_still_match_is_held_back() -> None:
    """Tokens that no stop string can begin with go out at once, others as soon as it is clear."""
    _, _, seen = run([b"abc", b"S", b"T", b"x", b"S"], (b"STOP",))
    assert seen == [b"abc", b"abc", b"abc", b"abcSTx", b"abcSTx"]


def test_overlapping_beginnings() -> None:
    """A false start inside the stop string does not hide the real one."""
    assert run([b"a", b"a", b"a", b"b"], (b"aab",))[:2] == (b"a", b"aab")
    assert run([b"xab", b"ab", b"c"], (b"ababc",))[:2] == (b"x", b"ababc")


def test_first_complete_stop_string_wins() -> None:
    """Of several stop strings the one that is complete first counts; of two that end together the longer."""
    assert run([b"one two three"], (b"three", b"two"))[1] == b"two"
    assert run([b"xxend"], (b"end", b"xend"))[:2] == (b"x", b"xend")


def test_stop_strings_inside_characters() -> None:
    """Stop strings are matched as bytes, so a character split over tokens is found."""
    fox = "🦊".encode()
    assert run([b"a", fox[:2], fox[2:], b"b"], (fox,))[:2] == (b"a", fox)


def push_all(stream: OutputStream, ids: list[int]):  # type: ignore[no-untyped-def]
    out = []
    for token_id in ids:
        tokens, ending = stream.push(token_id)
        out += tokens
        if ending is not None:
            return out, ending
    return out, None


def test_end_token_flushes_and_has_no_bytes() -> None:
    """An end token sends what was held back and carries no bytes itself."""
    stream = OutputStream(SamplingParams(max_tokens=20, stop=(b"AB",)), frozenset({EOS}), TABLE)
    out, ending = push_all(stream, [ord("x"), ord("A"), EOS])
    assert [token.piece for token in out] == [b"x", b"A", b""]
    assert ending is not None
    assert (ending.reason, ending.stop_token_id) == (FinishReason.STOP, EOS)


def test_ignore_eos_keeps_going() -> None:
    """With ignore_eos an end token is a token like any other."""
    stream = OutputStream(SamplingParams(max_tokens=3, ignore_eos=True), frozenset({EOS}), TABLE)
    out, ending = push_all(stream, [EOS, EOS, ord("x")])
    assert [token.piece for token in out] == [b"<|end|>", b"<|end|>", b"x"]
    assert out[0].special
    assert ending is not None
    assert ending.reason is FinishReason.LENGTH


def test_length_flushes_what_was_held_back() -> None:
    """The last token ends the output with LENGTH and everything held back is sent."""
    stream = OutputStream(SamplingParams(max_tokens=2, stop=(b"ABC",)), frozenset(), TABLE)
    out, ending = push_all(stream, [ord("A"), ord("B")])
    assert b"".join(token.piece for token in out) == b"AB"
    assert ending is not None
    assert ending.reason is FinishReason.LENGTH


def test_stop_strings_count_only_after_min_tokens() -> None:
    """A stop string within the minimum length does not end the output."""
    stream = OutputStream(SamplingParams(max_tokens=9, min_tokens=2, stop=(b"A",)), frozenset(), TABLE)
    out, ending = push_all(stream, [ord("A"), ord("A"), ord("b"), ord("A"), ord("c")])
    assert b"".join(token.piece for token in out) == b"AAb"
    assert ending is not None
    assert ending.stop_string == b"A"


def test_token_bytes_are_exact() -> None:
    """The bytes of a text's tokens put together are the text's bytes, for any characters, and added tokens are flagged."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    table = TokenTable.from_file(TINY / "tokenizer.json", tokenizer.get_vocab_size())
    rng = random.Random(4)
    texts = ["Hello, world!\n\ttabs", "日本語テキスト", "🦊👩‍👩‍👧 emoji", "".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(500))]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(table.pieces[i] for i in ids).decode() == text
    think = tokenizer.token_to_id("<think>")
    assert think in table.added
    assert table.pieces[think] == b"<think>"
    assert tokenizer.token_to_id("a") not in table.added


def test_other_tokenizers_are_refused(tmp_path: pathlib.Path) -> None:
    """A tokenizer without exact bytes, or with ids beyond the vocabulary, is refused by name."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": []}, "decoder": None}))
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        TokenTable.from_file(path, 10)
    with pytest.raises(CheckpointError, match="beyond"):
        TokenTable.from_file(TINY / "tokenizer.json", 100)
    with pytest.raises(CheckpointError, match="does not exist"):
        TokenTable.from_file(tmp_path / "nothing.json", 100)


def test_a_stop_string_goes_on_over_tokens_that_are_not_shown() -> None:
    """Their text ends nothing, unless it is a stop string as a whole; where they are shown it counts like any other."""
    hidden = frozenset({7})

    def shown(stops: tuple[bytes, ...], *, keep: bool = False, hide: frozenset[int] = hidden) -> tuple[bytes, list[int], bytes | None]:
        """(text as its reader sees it, ids that went out, stop string) of 'you?', a hidden <|user|>, 'yet', '.'."""
        matcher, out, found = StopMatcher(stops, keep_stop=keep, hidden=hide), list[OutToken](), None
        for token in (OutToken(1, b"How are you?"), OutToken(7, b"<|user|>"), OutToken(2, b"yet"), OutToken(3, b".")):
            tokens, found = matcher.push(token)
            out += tokens
            if found is not None:
                break
        out += [] if found is not None else matcher.flush()
        return b"".join(token.piece for token in out if token.token_id not in hide), [token.token_id for token in out], found

    assert shown((b"you?yet",)) == (b"How are ", [1], b"you?yet")
    assert shown((b"you?yet",), keep=True) == (b"How are you?yet", [1, 7, 2], b"you?yet")
    assert shown((b"?yet.",)) == (b"How are you", [1], b"?yet.")
    assert shown((b"user",)) == (b"How are you?yet.", [1, 7, 2, 3], None)
    assert shown((b">yet", b"us")) == (b"How are you?yet.", [1, 7, 2, 3], None)
    assert shown((b"<|user|>",)) == (b"How are you?", [1], b"<|user|>")
    assert shown((b"<|user|>",), keep=True) == (b"How are you?", [1, 7], b"<|user|>")
    assert shown((b"?<|user|>", b"you?yes")) == (b"How are you?yet.", [1, 7, 2, 3], None)
    everything = frozenset[int]()
    assert shown((b"you?yet",), hide=everything) == (b"How are you?<|user|>yet.", [1, 7, 2, 3], None)
    assert shown((b"user",), hide=everything) == (b"How are you?<|", [1, 7], b"user")


@pytest.mark.parametrize(("show", "text", "stop"), [(False, b"A", b"BC"), (True, b"AB!C", b"")])
def test_control_tokens_are_shown_to_stop_strings_only_on_request(show: bool, text: bytes, stop: bytes) -> None:
    """skip_special_tokens false, as the client sees them."""
    table = TokenTable([b"A", b"B", b"!", b"C"], frozenset({2}), frozenset({2}))
    stream = OutputStream(SamplingParams(stop=(b"BC",), max_tokens=4, show_special_tokens=show), frozenset(), table)
    out, ending = [], None
    for token in (0, 1, 2, 3):
        tokens, ending = stream.push(token)
        out += tokens
    assert ending is not None
    assert ending.stop_string == stop
    assert b"".join(token.piece for token in out) == text
