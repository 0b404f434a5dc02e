"""The dry run of `bench.gpu_fast`: made-up logits and times through everything that needs no GPU. None of its figures mean anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.fast_fidelity import Run, Setting

VOCAB = 32


class DryRig:
    """Logits that depend on prompt, step and mode alone."""

    def time_left(self) -> bool:
        """Always."""
        return True

    def forced(self, setting: Setting, groups: list[list[list[int]]], continuations: Any, steps: int) -> tuple[Run, Any]:
        """As the GPU's rig."""
        logits: list[Any] = []
        prompts: list[int] = []
        fed: list[list[list[int]]] = []
        number = 0
        for index, group in enumerate(groups):
            tokens: list[list[int]] = [[] for _ in group]
            for step in range(steps):
                for stream in range(len(group)):
                    row = noise(number + stream, step) + np.float32(setting.noise) * noise(setting.seed, 9, step)
                    row += np.float32(1e-3 if setting.fast else 0.0) * noise(7, step)
                    logits.append(row)
                    prompts.append(number + stream)
                    tokens[stream].append(int(row.argmax()) if continuations is None else continuations[index][stream][step])
            fed.append(tokens)
            number += len(group)
        return Run(logits, prompts, {"restarts": setting.restarts}), fed

    def stock_error(self, group: list[list[int]]) -> dict[str, float]:
        """Made up."""
        return {"stock": 1e-3, "ours": 4e-5, "experts": float(len(group))}


def noise(*seed: int) -> NDArray[np.float32]:
    """A row of it."""
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def speed(results: Any) -> None:
    """Rows of the speed part's shape."""
    for derate in (1, 2):
        for streams in (1, 2, 4):
            for name, ms in (("exact in step", 10.0), ("exact between steps", 11.0), ("fast without the lane", 9.0), ("fast", 7.0)):
                row = {"name": name, "streams": streams, "link_derate": derate, "ms": ms * derate, "tok_s": 1000 * streams / ms / derate}
                extra = {"step_over_bound": 1.1, "planner_error_pct": 5.0} if name == "fast" else {}
                results.add(part="speed", **row, **extra)
    results.add(part="speed", name="publish to reply", publish_to_reply_us=9.0, publish_to_reply_p99_us=12.0)
