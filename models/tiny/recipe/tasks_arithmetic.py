# ruff: noqa: E501  (lists of wordings read better in long lines)
"""Sums and differences of numbers up to two digits, with digit-by-digit reasoning."""

from __future__ import annotations

from .draw import Draw, Exchange, exchange

_SUM = [
    "What is {a} + {b}?", "What is {a}+{b}?", "{a}+{b}", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}=", "What is {a} plus {b}?",
    "Add {a} and {b}.", "add {a} and {b}", "Calculate {a} + {b}", "Compute {a}+{b}.", "How much is {a} + {b}?", "{a} plus {b}",
    "How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "Sum of {a} and {b}?", "what's {a}+{b}?", "Add {b} to {a}.",
    "Please calculate {a} + {b}.", "Can you add {a} and {b}?", "Give me the sum of {a} and {b}.", "{a} plus {b} is?",
    "What does {a} + {b} equal?", "Hi! What is {a} + {b}?", "Tell me {a} + {b}.", "Solve {a} + {b}", "And {a} + {b}?",
    "What do you get if you add {a} and {b}?", "I need the sum of {a} and {b}", "Compute the sum of {a} and {b}.", "{a} + {b}?",
    "{a} and {b} together?", "What do {a} and {b} make?", "{a} added to {b}", "Total of {a} and {b}?", "What is the total of {a} and {b}?",
    "Evaluate {a} + {b}", "{a} + {b} equals?", "{a} plus {b} equals", "Find {a} + {b}.", "Sum: {a} + {b}", "sum {a} {b}", "Sum up {a} and {b}",
    "What is the result of {a} + {b}?", "Result of {a}+{b}?", "Do the math: {a} + {b}", "Math: {a}+{b}", "Figure out {a} + {b}.",
    "I have {a} apples and get {b} more. How many do I have?", "If I add {b} to {a}, what do I get?", "Let me know {a} + {b}.",
    "*Could you calculate {a} + {b}?", "*Please add {a} and {b}.", "*So what is {a} + {b}?", "*Work out {a} + {b}.",
    "*Tell me the sum of {a} and {b}.",
]  # fmt: skip
_DIFFERENCE = [
    "What is {a} - {b}?", "What is {a}-{b}?", "{a}-{b}", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}=", "What is {a} minus {b}?",
    "Subtract {b} from {a}.", "subtract {b} from {a}", "Calculate {a} - {b}", "Compute {a}-{b}.", "How much is {a} - {b}?",
    "How much is {a} minus {b}?", "Take {b} away from {a}.", "what's {a}-{b}?", "{a} minus {b}", "Please calculate {a} - {b}.",
    "Can you subtract {b} from {a}?", "What does {a} - {b} equal?", "Tell me {a} - {b}.", "Solve {a} - {b}", "And {a} - {b}?",
    "What do you get if you subtract {b} from {a}?", "{a} minus {b} is?", "Hi! What is {a} - {b}?", "{a} - {b}?",
    "{a} take away {b}", "What is the difference of {a} and {b}?", "Difference of {a} and {b}?", "Evaluate {a} - {b}", "{a} - {b} equals?",
    "{a} minus {b} equals", "Find {a} - {b}.", "Remove {b} from {a}.", "What is the result of {a} - {b}?", "Result of {a}-{b}?", "Deduct {b} from {a}",
    "Do the math: {a} - {b}", "Math: {a}-{b}", "Figure out {a} - {b}.", "{a} less {b}?", "What remains of {a} after taking {b}?",
    "If I subtract {b} from {a}, what do I get?", "Let me know {a} - {b}.", "Take {b} from {a}", "What is left when you take {b} from {a}?",
    "*Could you calculate {a} - {b}?", "*Please subtract {b} from {a}.", "*So what is {a} - {b}?", "*Work out {a} - {b}.",
]  # fmt: skip


def _pair(draw: Draw, operator: str) -> tuple[int, int]:
    def make() -> str:
        high_a, high_b = (draw.one([9, 99, 99, 99]) for _ in range(2))
        return f"{draw.number(0, high_a)}{operator}{draw.number(0, high_b)}"

    left, right = draw.value("pair", make).split(operator)
    return int(left), int(right)


def explain_sum(a: int, b: int) -> str:
    """The written addition, units first."""
    units = a % 10 + b % 10
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    carry = " + 1" if units > 9 else ""
    return f"{a % 10} + {b % 10} = {units}, {a // 10} + {b // 10}{carry} = {(a + b) // 10}, so {a + b}."


def explain_difference(a: int, b: int) -> str:
    """The written subtraction, units first; the larger number goes on top."""
    if a < b:
        return f"{b} is larger. {explain_difference(b, a)[:-1]}, negative."
    if a < 10:
        return f"{a} - {b} = {a - b}."
    borrow = a % 10 < b % 10
    units = a % 10 + (10 if borrow else 0)
    minus = " - 1" if borrow else ""
    tens = a // 10 - b // 10 - (1 if borrow else 0)
    return f"{units} - {b % 10} = {units - b % 10}, {a // 10} - {b // 10}{minus} = {tens}, so {a - b}."


def addition(draw: Draw) -> Exchange:
    a, b = _pair(draw, "+")
    ask = draw.phrase(_SUM).replace("{a}", str(a)).replace("{b}", str(b))
    return exchange("sum", ask, explain_sum(a, b), f"{a} + {b} = {a + b}")


def subtraction(draw: Draw) -> Exchange:
    a, b = _pair(draw, "-")
    if a < b and draw.chance(0.6) and draw.held == _reserved(b, a):
        a, b = b, a
    ask = draw.phrase(_DIFFERENCE).replace("{a}", str(a)).replace("{b}", str(b))
    return exchange("difference", ask, explain_difference(a, b), f"{a} - {b} = {a - b}")


def _reserved(a: int, b: int) -> bool:
    from .draw import is_reserved

    return is_reserved("pair", f"{a}-{b}")
