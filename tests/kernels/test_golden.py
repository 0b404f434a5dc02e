"""Every implementation of the expert arithmetic gives the bits of the golden file, at every step."""

from __future__ import annotations

import json

import pytest

from kernels.python import expert, reference
from tests.kernels.cases import Case, all_cases, build
from tests.kernels.make_golden import ARITHMETIC_VERSION, GOLDEN_PATH, digest, step_digests
from tests.kernels.native_trace import expert_steps

GOLDEN = json.loads(GOLDEN_PATH.read_text())
ENTRIES = {entry["name"]: entry["sha256"] for entry in GOLDEN["cases"]}


@pytest.mark.parametrize("implementation", ["numpy", *expert.variants()])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_step_has_the_golden_bits(case: Case, implementation: str) -> None:
    """The record, the input and every intermediate of a case hash to the golden values."""
    shape, record, x = build(case)
    steps = reference.expert(shape, record, x) if implementation == "numpy" else expert_steps(implementation, shape, record, x)
    found = {"record": digest(record), "x": digest(x), **step_digests(steps)}
    assert found == ENTRIES[case.name]


def test_the_golden_file_covers_what_it_promises() -> None:
    """At least 64 cases with three codebooks, K = 1..8, 1..8 rows, and one entry per case of the generator."""
    entries = GOLDEN["cases"]
    assert len(entries) >= 64
    assert [entry["name"] for entry in entries] == [case.name for case in all_cases()]
    decoders = {(codebook, k) for codebook in ("inst3", "mcg", "mul1") for k in range(1, 9)}
    assert {(entry["codebook"], k) for entry in entries for k in entry["bits"]} >= decoders
    assert {entry["rows"] for entry in entries} == set(range(1, 9))


def test_the_golden_file_belongs_to_the_library() -> None:
    """The library's arithmetic version is the golden file's."""
    assert GOLDEN["arithmetic_version"] == ARITHMETIC_VERSION == expert.kernel_info().arithmetic_version


def test_digests_of_a_case_differ_between_steps() -> None:
    """No step of an ordinary case is empty or equal to another: a hash of nothing would prove nothing."""
    digests = list(ENTRIES["3 rows"].values())
    assert len(set(digests)) == len(digests)
