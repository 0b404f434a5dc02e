"""What `bench.gpu_fast` makes of logits: hashes, divergences with an interval by prompt, agreement. No GPU, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.python.fast_pager import Forced

Logits = NDArray[np.float32]
_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Setting:
    """One way to run decode steps.

    fast: with the integer kernels; otherwise exllamav3's. slots: share of the records that have one. placed: share that is in one at the
    start. noise: relative RMS of Gaussian noise in each expert's output (exact only). restarts: kill cpu_expert so often in mid-run.
    hint_records: most that a guess of the next layer's picks brings ahead. hint_recall: how many of the picks a simulated guess holds.
    """

    name: str
    fast: bool = True
    slots: float = 0.16
    placed: float = 0.16
    forced: Forced = Forced.BY_COST
    seed: int = 0
    noise: float = 0.0
    restarts: int = 0
    lane: bool = True
    link_derate: int = 1
    on_demand: bool = True
    admit: bool = True
    hint_records: int = 0
    hint_recall: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Logits of forced decode steps, in one order for every run: float32 [vocab] for each position, and the prompt of each."""

    logits: list[Logits]
    prompts: list[int]
    facts: dict[str, Any]


def digest(run: Run) -> str:
    """One hash of all bits of all steps."""
    total = hashlib.sha256()
    for row in run.logits:
        total.update(np.ascontiguousarray(row, np.float32).tobytes())
    return total.hexdigest()


def steps_differing(want: Run, got: Run) -> int:
    """Positions whose logits differ in any bit."""
    if len(want.logits) != len(got.logits):
        return max(len(want.logits), len(got.logits))
    return sum(a.tobytes() != b.tobytes() for a, b in zip(want.logits, got.logits, strict=True))


def divergences(want: Run, got: Run) -> NDArray[np.float64]:
    """KL(want || got) of every position, in nats."""
    return np.array([_divergence(a, b) for a, b in zip(want.logits, got.logits, strict=True)])


def _divergence(want: Logits, got: Logits) -> float:
    p, q = _log_softmax(want), _log_softmax(got)
    return float(np.sum(np.exp(p) * (p - q)))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def agreement(want: Run, got: Run) -> float:
    """Share of positions with the same most likely token."""
    return float(np.mean([int(a.argmax()) == int(b.argmax()) for a, b in zip(want.logits, got.logits, strict=True)]))


def interval(values: NDArray[np.float64], prompts: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; prompts are drawn, not positions, which are not independent."""
    names, numbers = np.unique(np.asarray(prompts), return_inverse=True)
    sums = np.bincount(numbers, weights=values)
    counts = np.bincount(numbers)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(names), (_BOOTSTRAPS, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def distance(exact: Run, fast: Run) -> dict[str, Any]:
    """Of `fast` to `exact`: mean KL with its interval, agreement, positions."""
    ours = divergences(exact, fast)
    low, high = interval(ours, exact.prompts)
    return {"kl": float(ours.mean()), "kl_95": [low, high], "top1": agreement(exact, fast), "positions": len(exact.logits)}


def save(path: Path, run: Run, fed: Any) -> None:
    """Keeps a run and the tokens that it was fed for a later command."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as out:
        np.savez(
            out, logits=np.stack(run.logits), prompts=np.array(run.prompts), more=np.array(json.dumps({"fed": fed, "facts": run.facts}))
        )
    part.replace(path)


def load(path: Path) -> tuple[Run, Any]:
    """What `save` kept."""
    with np.load(path) as kept:
        more = json.loads(str(kept["more"]))
        return Run(list(kept["logits"]), kept["prompts"].tolist(), more["facts"]), more["fed"]
