# ruff: noqa: E501, SIM905  (lists of wordings read better in long lines)
"""Dress a phrasing: lead-ins, politeness, casing and punctuation, so that no wording is learned by heart."""

from __future__ import annotations

import random
import re

_BEFORE_ORDER = [
    "Please ", "please ", "Can you ", "Could you ", "Would you ", "Can you please ", "I want you to ", "I'd like you to ", "Now ",
    "Then ", "Next, ", "Ok, ", "Okay, ", "Hey, ", "Hi, please ", "Hi! ", "Hello, ", "Just ", "You should ", "Let us ", "So, ", "Go and ",
    "I need you to ", "Your task: ", "Task: ", "First, ", "Now please ", "Hello! Please ", "Try to ", "Kindly ", "Will you ", "Hi, can you ",
]  # fmt: skip
_BEFORE_QUESTION = [
    "Hi! ", "Hello, ", "Hey, ", "So ", "And ", "Ok, ", "Tell me, ", "Question: ", "Quick question: ", "I wonder, ", "Now, ", "Hello! ",
    "Please tell me, ", "Next question: ", "Good morning, ", "Excuse me, ", "One more: ", "Well, ", "Then ", "But ", "Sorry, ", "Okay. ",
]  # fmt: skip
_AFTER = [", please", " please", " for me", " now", ", thanks", ", thank you", " today", " again", " if you can", " right now"]
_AFTER_QUESTION = [" Thanks!", " Thank you.", " Please answer.", " Tell me.", " I want to know.", " Quick!", " Please!", " I forgot."]
_CJK_BEFORE = ["嗨，", "您好，", "请问一下，", "好的，", "那么", "我想知道", "老师，", "麻烦问一下，", "现在", "朋友，"]
_WORD = re.compile(r"[A-Za-z]+")
_ORDERS = frozenset(
    """add alphabetize answer arrange ask book build buy calculate call can check compare compute convert copy count create
    echo exchange execute extract fetch find format generate get give introduce invoke list look make name order output place plan play
    please print produce put reply repeat respond return reverse roll run save say schedule search send set show solve sort
    start subtract switch take tell text throw translate turn type use wake write multiply remind""".split()
)


def plain(text: str) -> str:
    """Letters, digits and slots only: two phrasings with equal plain forms count as the same."""
    return re.sub(r"[^a-z0-9{}\w]+", " ", text.lower()).strip()


def dress(rng: random.Random, text: str) -> str:
    """A variant of a phrasing with slots. Nothing is added next to a slot at the end, where it would join the value."""
    first = _WORD.match(text)
    if first is None:
        return rng.choice(_CJK_BEFORE) + text if ord(text[0]) > 0x2E80 or text.startswith("{c}的") else text
    word = first.group().lower()
    question = text.endswith("?")
    if rng.random() < 0.7:
        if word in _ORDERS and not question:
            text = rng.choice(_BEFORE_ORDER) + text[0].lower() + text[1:]
        elif question:
            text = rng.choice(_BEFORE_QUESTION) + (text[0].lower() + text[1:] if rng.random() < 0.7 else text)
    if rng.random() < 0.35 and text[-1] in "?.!" and text[-2] not in "}\"'":
        ending = text[-1]
        text = text + rng.choice(_AFTER_QUESTION) if question else text[:-1] + rng.choice(_AFTER) + ending
    roll = rng.random()
    if roll < 0.12 and text[-1] in "?.!" and text[-2] != '"':
        text = text[:-1]
    elif roll < 0.2 and text[-1] in "?.":
        text = text[:-1] + "!" if text[-1] == "." else text + "?"
    elif roll < 0.26:
        text = text[0].lower() + text[1:]
    return text
