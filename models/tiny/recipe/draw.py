# ruff: noqa: SIM905
"""Random values for the data generator, split by value into training and held-out."""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import phrasing, words

T = TypeVar("T")
Message = dict[str, Any]
Tool = dict[str, Any]

_SYLLABLES = [c + v for c in "b d f g h j k l m n p r s t v w z".split() for v in "aeiou"] + "ar el in on or us".split()
_HELD_SHARE = 26  # of 256: about one value in ten is never used in training


_EVERYDAY = frozenset(
    """field:name field:age field:city field:country field:title field:id field:email field:price field:color field:active
    field:tags field:items field:status field:count param:name param:city param:location param:query param:text param:id
    param:date param:time param:count param:amount param:to param:message param:title param:unit param:limit
    city:paris city:london city:berlin city:rome city:tokyo city:madrid city:new_york city:san_francisco name:alice name:ana
    name:tom name:anna name:john name:maria word:hello word:world word:apple word:banana word:cherry word:cat word:dog""".split()
)
"""Values that users type first; the model must know them, so they are never held out."""


def is_reserved(kind: str, value: str) -> bool:
    """Say whether a value (number pair, word, name, tool name, ...) is kept out of training."""
    if f"{kind}:{value.lower().replace(' ', '_')}" in _EVERYDAY:
        return False
    digest = hashlib.sha1(f"{kind}:{value.lower()}".encode()).digest()
    return digest[0] < _HELD_SHARE


@dataclass
class Exchange:
    """One task: its messages (user first, assistant last) and the tools that must be declared for it.

    Assistant messages carry `reasoning_content`; the mixture decides whether it is shown.
    """

    kind: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    system: str | None = None
    follow_up: list[Message] = field(default_factory=list)
    """Messages that must come at the end of the conversation, after other exchanges (memory questions)."""


def exchange(kind: str, user: str, reasoning: str, answer: str, **extra: Any) -> Exchange:
    """Build a question-and-answer exchange."""
    return Exchange(kind, [user_turn(user), answer_turn(reasoning, answer)], **extra)


def user_turn(text: str) -> Message:
    return {"role": "user", "content": text}


def answer_turn(reasoning: str, answer: str) -> Message:
    return {"role": "assistant", "content": answer, "reasoning_content": reasoning}


class Draw:
    """A seeded source of values. `held` chooses the reserved values; `used` records (kind, value) pairs."""

    def __init__(self, seed: int | str, *, held: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held = held
        self.used: list[tuple[str, str]] = []

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def phrase(self, phrases: Sequence[str], *, fact: bool = False) -> str:
        """Choose a phrasing. Those marked with a leading "*" are never used in training.

        A held-out fact always takes a marked phrasing; other held-out tasks take any, since their values are new.
        """
        marked = [p for p in phrases if p.startswith("*")]
        plain = [p for p in phrases if not p.startswith("*")]
        if not self.held:
            choice = self.one(plain)
            if self.chance(0.5):
                dressed = phrasing.dress(self.rng, choice)
                if phrasing.plain(dressed) not in {phrasing.plain(p[1:]) for p in marked}:
                    return dressed
            return choice
        if fact or (marked and self.chance(0.4)):
            choice = self.one(marked)[1:]
            self.used.append(("phrase", choice))
            return choice
        return self.one(plain)

    def value(self, kind: str, make: Callable[[], str]) -> str:
        """Draw until the value lies on this source's side of the split."""
        for _ in range(2000):
            candidate = make()
            if is_reserved(kind, candidate) == self.held:
                self.used.append((kind, candidate))
                return candidate
        raise ValueError(f"no {kind} value on the {'held-out' if self.held else 'training'} side after 2000 draws")

    # -- words ---------------------------------------------------------------------------------------------------

    def nonsense(self) -> str:
        """A made-up lower-case word: syllables or plain random letters."""
        if self.chance(0.6):
            word = "".join(self.one(_SYLLABLES) for _ in range(self.number(1, 3)))
            return word + (self.one("bdklmnrstxz") if self.chance(0.4) else "")
        return "".join(self.one(string.ascii_lowercase) for _ in range(self.number(2, 7)))

    def _plain_word(self) -> str:
        roll = self.rng.random()
        if roll < 0.5:
            return self.one(words.NOUNS)
        if roll < 0.65:
            return self.one(words.ADJECTIVES)
        if roll < 0.72:
            return self.one(words.VERBS)
        return self.salad() if roll < 0.82 else self.nonsense()

    def salad(self) -> str:
        """A word glued from pieces of real words: it exercises every token of the vocabulary."""
        parts = []
        for _ in range(self.number(1, 3)):
            source = self.one(_ALL_WORDS)
            start = self.number(0, max(0, len(source) - 2))
            parts.append(source[start : start + self.number(2, 5)])
        return "".join(parts).lower()[:12]

    def word(self) -> str:
        """A lower-case word, real or made up."""
        return self.value("word", self._plain_word)

    def words(self, count: int) -> list[str]:
        """`count` different words."""
        found: list[str] = []
        while len(found) < count:
            candidate = self.word()
            if candidate not in found:
                found.append(candidate)
        return found

    def cased(self, word: str) -> str:
        roll = self.rng.random()
        return word if roll < 0.8 else word.capitalize() if roll < 0.93 else word.upper()

    def phrase_of_words(self, low: int, high: int) -> str:
        """Several words with spaces, the first one sometimes capitalised."""
        text = " ".join(self.words(self.number(low, high)))
        return text.capitalize() if self.chance(0.3) else text

    # -- names and places ----------------------------------------------------------------------------------------

    def _any_name(self) -> str:
        if self.chance(0.6):
            return self.one(words.NAMES)
        return "".join(self.one(_SYLLABLES) for _ in range(self.number(2, 3))).capitalize() + (
            self.one("nlrsx") if self.chance(0.3) else ""
        )

    def name(self) -> str:
        return self.value("name", self._any_name)

    def _any_city(self) -> str:
        roll = self.rng.random()
        if roll < 0.6:
            return self.one(words.CITIES)
        if roll < 0.75:
            return self.one(words.TWO_WORD_CITIES)
        place = "".join(self.one(_SYLLABLES) for _ in range(self.number(2, 3))).capitalize()
        return place + self.one(["", "ville", "burg", "ton", " City", "ford"])

    def city(self) -> str:
        return self.value("city", self._any_city)

    # -- other scripts -------------------------------------------------------------------------------------------

    def _any_cjk(self) -> str:
        roll = self.rng.random()
        if roll < 0.5:
            return "".join(self.one(words.CJK_WORDS) for _ in range(self.number(1, 3)))
        if roll < 0.8:
            return "".join(self.one(words.CJK_CHARS) for _ in range(self.number(1, 5)))
        return "".join(chr(self.number(*words.CJK_RANGE)) for _ in range(self.number(1, 4)))

    def cjk(self) -> str:
        return self.value("cjk", self._any_cjk)

    def emoji(self, low: int = 1, high: int = 4) -> str:
        return self.value("emoji", lambda: "".join(self.one(words.EMOJI) for _ in range(self.number(low, high))))

    # -- numbers -------------------------------------------------------------------------------------------------

    def integer(self, high: int = 9999) -> int:
        """An integer >= 0 with one to len(str(high)) digits, each length equally likely."""
        digits = len(str(high))
        return int(self.value("number", lambda: str(self.number(0, min(high, 10 ** self.number(1, digits))))))

    def decimal(self) -> float:
        return float(self.value("number", lambda: f"{self.number(0, 99)}.{self.number(1, 9)}"))


_ALL_WORDS = words.NOUNS + words.ADJECTIVES + words.VERBS + words.NAMES + words.CITIES + words.COLORS + words.FOODS
