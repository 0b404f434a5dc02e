"""Rows of a measurement that goes on over several commands: kept beside the result file as long as the machine is not started anew."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import report

Row = dict[str, Any]


class Rows:
    """Rows by case name, kept in a file over commands and written out after each case.

    Args:
        state: the file that the next command goes on with; of another boot it is begun anew.
        out: the result file.
        started: bench.report.start()'s; None: that of the command which wrote last.
        summarise: figures from rows and facts.
    """

    def __init__(self, state: Path, out: Path, started: Row | None, summarise: Callable[[dict[str, Row], Row], Row]) -> None:
        self._state, self._out, self._summarise = state, out, summarise
        self._started: Row = started or {}
        self.rows: dict[str, Row] = {}
        self.facts: Row = {"boot_id": boot_id()}
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads(state.read_text())
            if document["facts"]["boot_id"] == self.facts["boot_id"]:
                self.rows, self.facts = document["rows"], document["facts"]
                self._started = started or document["started"]

    def put(self, name: str, row: Row) -> None:
        """Notes a row and saves all of them."""
        self.rows[name] = row
        print(json.dumps({"name": name, **row}), flush=True)
        self.save()

    def note(self, **facts: Any) -> None:
        """Notes facts and saves."""
        self.facts |= facts
        self.save()

    def done(self, name: str) -> bool:
        """True when the case was measured."""
        return name in self.rows and "error" not in self.rows[name]

    def summary(self) -> Row:
        """The figures of the rows so far."""
        return self._summarise(self.rows, self.facts)

    def save(self) -> None:
        """Writes state and result."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        part = self._state.with_name(self._state.name + ".part")
        part.write_text(json.dumps({"rows": self.rows, "facts": self.facts, "started": self._started}, indent=1))
        os.replace(part, self._state)
        rows = [{"name": name, **row} for name, row in self.rows.items()]
        with contextlib.redirect_stdout(io.StringIO()):
            report.write_result(self._out, {**self._started, "facts": self.facts}, rows, self.summary())


def boot_id() -> str:
    """Of this boot: figures of one run belong to one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reasons(summary: Row, keys: tuple[str, ...], why: Callable[[str], str]) -> Row:
    """Why a figure is null, by its name.

    Args:
        keys: that a reader may look for.
        why: says it for a key that is null.
    """
    return {key: why(key) for key in keys if summary.get(key) is None}
