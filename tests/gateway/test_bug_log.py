"""The table of known faults (README.md beside this file) names tests that exist and run."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+) \|")
ROWS = {int(number): re.findall(r"`([^`]+)`", tests) for number, _, tests in ROW.findall((TESTS / "gateway" / "README.md").read_text())}


@functools.cache
def running_tests(file: Path) -> frozenset[str]:
    """Names of a file's test functions that no decorator skips."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(word in ast.unparse(decorator) for decorator in node.decorator_list for word in ("skip", "xfail"))
    )


def test_every_fault_has_a_row() -> None:
    """Numbers without gaps, each with at least one test."""
    assert list(ROWS) == list(range(1, 50))
    assert all(ROWS.values())


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_of_a_row_exist(number: int) -> None:
    """A renamed or dropped test takes its row along, or the row finds another."""
    for name in ROWS[number]:
        file, _, function = name.partition("::")
        assert function in running_tests(TESTS / file), name
