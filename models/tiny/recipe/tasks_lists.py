# ruff: noqa: E501, SIM905  (lists of wordings read better in long lines)
"""Copy, reverse, sort, repeat and count: answers that are made of the question's own words."""

from __future__ import annotations

from .draw import Draw, Exchange, exchange

_COPY = [
    "Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Copy this: {t}", "Echo: {t}", "Please repeat: {t}", "repeat {t}",
    "Repeat this text: {t}", "Write exactly this: {t}", "Please copy the following words: {t}", "Echo {t}", "echo {t}",
    'Repeat "{t}"', 'Say "{t}"', 'Please say "{t}".', 'Can you repeat "{t}"?', "Repeat the following: {t}", "Copy: {t}",
    "Repeat after me: {t}.", "Repeat these words: {t}", "Repeat the words {t}", "Write: {t}", "Print {t}", "Copy {t}",
    'Repeat exactly: "{t}"', "Please echo this back: {t}", "Repeat this back to me: {t}", 'Reply with exactly "{t}".',
    "Reply with: {t}", "Reply with exactly: {t}", "Output: {t}", 'Answer with "{t}"', "Say {t}", 'Just say "{t}".',
    "Type the following text: {t}", "Return this text unchanged: {t}", "Please repeat after me: {t}", "Echo this: {t}",
    "Repeat the following sentence: {t}", "Repeat this sentence: {t}", "Repeat the phrase {t}", 'Repeat the sentence "{t}"', "Echo back: {t}",
    "Echo back exactly: {t}", "Write down {t}", 'Write "{t}"', "Copy the words {t}", "Copy out: {t}", "Say this: {t}", "Say exactly: {t}",
    "Repeat the text: {t}", "Say the words {t}", "Give me back: {t}", "Respond with: {t}", 'Respond with "{t}"', "Spell out: {t}",
    "Print this: {t}", "Output exactly: {t}", "Repeat what I say: {t}", "Return: {t}", 'Answer exactly "{t}"', "Text to repeat: {t}",
    "Repeat the following words exactly as they are: {t}", "Send back {t}", "Mirror this message: {t}", "Quote: {t}", "Parrot: {t}",
    "Repeat this message: {t}", "Repeat this word: {t}", "Repeat these emoji: {t}", "Repeat this emoji: {t}", "Repeat this line: {t}",
    "Repeat this:\n{t}", "Copy the following text:\n{t}", "Repeat after me:\n\n{t}",
    "*Could you repeat this: {t}", "*Now repeat: {t}", "*Please write exactly: {t}", '*Please repeat "{t}"',
    '*Copy exactly: "{t}"', "*Say the following: {t}",
]  # fmt: skip
_REVERSE = [
    "Reverse: {t}", "Reverse these words: {t}", "Reverse the order of these words: {t}", "Write these words backwards: {t}",
    "Put these words in reverse order: {t}", "Reverse the words {t}", "Say these words in reverse order: {t}", "reverse {t}",
    "Please reverse the list: {t}", "Reverse this list: {t}", "Give these words in the opposite order: {t}",
    "Can you reverse these words? {t}", "List these words backwards: {t}", "Reverse the word order: {t}",
    "Reverse the following words: {t}", "Reverse the order: {t}", "{t}. Reverse these words.", "From last to first: {t}",
    "Turn around the order of {t}", "Flip the order: {t}", "Flip these words: {t}", "Invert the list: {t}", "Backwards: {t}", "In reverse: {t}",
    "Reverse the order of: {t}", "Reverse the order of the words {t}", "Reverse the sequence: {t}", "Write in reverse order: {t}",
    "Say {t} in reverse order", "Put {t} in reverse order", "List in reverse: {t}", "Order from last to first: {t}", "Last word first: {t}",
    "Start from the end: {t}", "Give me these words in reverse: {t}", "Words in reverse order: {t}", "Reverse this sequence: {t}",
    "Reverse this list:\n{t}", "Reverse these words:\n{t}",
    "*Please reverse these words: {t}", "*Repeat these words in reverse order: {t}", "*Could you reverse this list: {t}",
]  # fmt: skip
_SORT = [
    "Sort: {t}", "Sort these words: {t}", "Sort these words alphabetically: {t}", "Put these words in alphabetical order: {t}",
    "Order alphabetically: {t}", "Sort the words {t}", "Sort alphabetically: {t}", "Alphabetize: {t}", "sort {t}",
    "Please sort the list: {t}", "Sort this list: {t}", "Arrange these words alphabetically: {t}", "Sort from a to z: {t}",
    "Can you sort these words? {t}", "Sort the following words in alphabetical order: {t}", "{t}. Sort these words.",
    "Sort the following list alphabetically: {t}", "Alphabetical order please: {t}", "Please alphabetize these words: {t}",
    "Put these in order: {t}", "Order these words: {t}", "Order the words {t}", "Sort the list {t}", "Arrange alphabetically: {t}", "A to Z: {t}",
    "Arrange in alphabetical order: {t}", "Sort in alphabetical order: {t}", "List these words alphabetically: {t}", "Sorted: {t}",
    "Put the words {t} in alphabetical order", "Order this list alphabetically: {t}", "Sort the following words: {t}", "Order: {t}",
    "Give me these words in alphabetical order: {t}", "Alphabetically sort {t}", "Sort by letter: {t}", "Sort from first to last letter: {t}",
    "Which order is alphabetical? {t}", "Words in alphabetical order: {t}", "Rank alphabetically: {t}", "Arrange: {t}",
    "Sort these words:\n{t}", "Sort this list:\n\n{t}",
    "*Please sort these words: {t}", "*Could you put these in alphabetical order: {t}", "*Sort these alphabetically: {t}",
]  # fmt: skip
_TIMES = [
    "Say {t} {n} times.", "Repeat {t} {n} times", "Write {t} {n} times.", 'Write the word "{t}" {n} times',
    'Say "{t}" {n} times.', "Repeat the word {t} {n} times.", "Please say {t} {n} times", "Print {t} {n} times",
    "*Please write {t} {n} times.", '*Repeat "{t}" {n} times.',
]  # fmt: skip
_COUNT = [
    "Count from {a} to {b}", "Count from {a} to {b}.", "count from {a} to {b}", "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?", "Count {a} to {b}", "List the numbers from {a} to {b}", "Numbers from {a} to {b}",
    "Write the numbers from {a} to {b}.", "Say the numbers {a} to {b}", "Start at {a} and count to {b}.",
    "Count up from {a} to {b}", "Counting from {a} to {b}", "Enumerate {a} to {b}", "Count from {a} until {b}.", "{a} to {b}, count!",
    "All numbers from {a} to {b}", "Give me the numbers from {a} to {b}", "Show the numbers {a} to {b}.", "Print the numbers from {a} to {b}",
    "Numbers {a} through {b}", "Count numbers from {a} to {b}.", "List all integers from {a} to {b}", "Go from {a} to {b}.",
    "*Could you count from {a} to {b}?", "*Write all numbers from {a} to {b}.", "*Please list the numbers from {a} to {b}.",
]  # fmt: skip
_COUNT_UP = [
    "Count to {b}",
    "count to {b}",
    "Count up to {b}.",
    "Please count to {b}",
    "Can you count to {b}?",
    "Count till {b}",
    "Count until {b}.",
    "Count all the way to {b}.",
    "Counting to {b}",
    "Count from one to {b}",
    "Count numbers up to {b}.",
    "Numbers up to {b}",
    "I want to hear you count to {b}.",
    "Count to the number {b}.",
    "count to {b} please",
    "Count to {b}!",
    "Count to {b} for me.",
    "*Count to {b}, please.",
]
_NUMBER_WORDS = dict(enumerate("zero one two three four five six seven eight nine ten eleven twelve".split()))


def _separated(draw: Draw, items: list[str]) -> tuple[str, str]:
    """Join words as a user would; returns (text, separator of the answer)."""
    roll = draw.rng.random()
    if roll < 0.5:
        return " ".join(items), " "
    if roll < 0.87 or len(items) < 2:
        return ", ".join(items), ", "
    if roll < 0.93:
        return "\n".join(items), "\n"
    return ", ".join(items[:-1]) + " and " + items[-1], ", "


def _punctuated(draw: Draw) -> str:
    """Words and numbers joined as in running text."""
    parts = [draw.cased(draw.word()) if draw.chance(0.8) else str(draw.integer()) for _ in range(draw.number(2, 6))]
    joints = [draw.one([" ", " ", ", ", ". ", "! ", "? ", " - ", ": ", "; ", "'s ", " (", ") "]) for _ in parts[1:]]
    return parts[0] + "".join(j + w for j, w in zip(joints, parts[1:], strict=True)) + draw.one(["", ".", "!", "?"])


def copy(draw: Draw) -> Exchange:
    roll = draw.rng.random()
    kind = "copy"
    if roll < 0.5:
        text = " ".join(draw.cased(w) for w in draw.words(draw.number(1, 6)))
    elif roll < 0.6:
        text = " ".join(draw.cased(w) for w in draw.words(draw.number(7, 14)))
    elif roll < 0.65:
        text = _punctuated(draw)
    elif roll < 0.7:
        text = f"{draw.phrase_of_words(2, 5)}{draw.one('!?.')}" if draw.chance(0.5) else ", ".join(draw.words(draw.number(2, 5)))
    elif roll < 0.78:
        text = draw.one([draw.name(), draw.city(), str(draw.integer()), f"{draw.word()} {draw.integer()}"])
    else:
        kind = "cjk"
        text = draw.one([draw.cjk, draw.emoji, lambda: f"{draw.cjk()} {draw.emoji()}", lambda: f"{draw.word()} {draw.emoji()}"])()
    return exchange(kind, draw.phrase(_COPY).replace("{t}", text), "Copy the text.", text)


def times(draw: Draw) -> Exchange:
    count = draw.number(2, 5)
    text = draw.emoji(1, 1) if draw.chance(0.3) else draw.word()
    shown = str(count) if draw.chance(0.6) else _NUMBER_WORDS[count]
    ask = draw.phrase(_TIMES).replace("{t}", text).replace("{n}", shown)
    return exchange("copy", ask, f"Write it {count} times.", " ".join([text] * count))


def reverse(draw: Draw) -> Exchange:
    items = draw.words(draw.number(2, 6))
    text, sep = _separated(draw, items)
    return exchange("reverse", draw.phrase(_REVERSE).replace("{t}", text), "Start with the last word.", sep.join(items[::-1]))


def sort(draw: Draw) -> Exchange:
    count = draw.number(2, 5)
    items: list[str] = []
    same_letter = draw.chance(0.15)
    while len(items) < count:
        word = draw.word()
        # Most lists have different first letters; comparing deeper is the rare, hard case.
        if word in items or (not same_letter and any(word[0] == w[0] for w in items)):
            continue
        items.append(word)
    if draw.chance(0.12):
        items = [word.capitalize() for word in items]
    text, sep = _separated(draw, items)
    return exchange("sort", draw.phrase(_SORT).replace("{t}", text), "Sort by the first letters.", sep.join(sorted(items)))


def count(draw: Draw) -> Exchange:
    if draw.chance(0.4):
        first, last = 1, draw.number(2, 30) if draw.chance(0.8) else draw.number(31, 100)
        ask = draw.phrase(_COUNT_UP, fact=True) if draw.chance(0.5) else draw.phrase(_COUNT, fact=True)
    else:
        first = draw.number(0, 80)
        last = first + draw.number(1, 20)
        ask = draw.phrase(_COUNT, fact=True)
    numbers = list(range(first, last + 1))
    if draw.chance(0.15) and "{a}" in ask:
        numbers.reverse()
        first, last = last, first
    spelled = draw.chance(0.15) and max(first, last) <= 12
    low, high = (_NUMBER_WORDS[first], _NUMBER_WORDS[last]) if spelled else (str(first), str(last))
    ask = ask.replace("{a}", low).replace("{b}", high)
    return exchange("count", ask, "Count one by one.", ", ".join(map(str, numbers)))
