"""Turn conversations into training steps of fixed shapes, made by worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import SPECIAL_IDS
from .draw import Draw
from .mixture import compose
from .render import encode_training

PAD = SPECIAL_IDS["<|endoftext|>"]


@dataclass(frozen=True)
class Bucket:
    """Rows of one padded length; at most `targets` trained tokens fit (later ones are dropped)."""

    length: int
    rows: int
    targets: int


BUCKETS = (
    Bucket(64, 48, 1536),
    Bucket(128, 56, 3072),
    Bucket(256, 28, 2560),
    Bucket(448, 42, 4608),
    Bucket(640, 16, 2560),
    Bucket(1024, 4, 1280),
)
"""Their rows follow how long the mixture's conversations are, so that few are thrown away."""

Arrays = dict[str, NDArray[Any]]
Row = tuple[list[int], list[bool]]


def fit(length: int, buckets: tuple[Bucket, ...]) -> Bucket | None:
    """The smallest bucket for a conversation of this length."""
    return next((b for b in buckets if length <= b.length), None)


def pack(rows: list[Row], bucket: Bucket) -> Arrays:
    """Pad rows on the right; positions are flat indices whose next token is trained."""
    ids = np.full((bucket.rows, bucket.length), PAD, dtype=np.int64)
    positions = np.zeros(bucket.targets, dtype=np.int64)
    labels = np.zeros(bucket.targets, dtype=np.int64)
    weights = np.zeros(bucket.targets, dtype=np.float32)
    used = 0
    for row, (tokens, learn) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        for i in range(1, len(tokens)):
            if learn[i] and used < bucket.targets:
                positions[used], labels[used], weights[used] = row * bucket.length + i - 1, tokens[i], 1.0
                used += 1
    return {"ids": ids, "positions": positions, "labels": labels, "weights": weights}


def steps(seed: str, buckets: tuple[Bucket, ...] = BUCKETS) -> Iterator[list[Arrays]]:
    """Endless training steps from one seed: one batch per bucket. Rows that a full bucket cannot take are dropped."""
    number = 0
    while True:
        waiting: dict[int, list[Row]] = {b.length: [] for b in buckets}
        while any(len(waiting[b.length]) < b.rows for b in buckets):
            draw = Draw(f"{seed}-{number}")
            number += 1
            conversation = compose(draw)
            tokens, learn = encode_training(conversation.messages, conversation.tools, **conversation.options)
            bucket = fit(len(tokens), buckets)
            if bucket is not None and len(waiting[bucket.length]) < bucket.rows * 3:
                waiting[bucket.length].append((tokens, learn))
            if all(len(waiting[b.length]) >= b.rows for b in buckets[:-2]) and number % 4 == 0:
                # The rare longest buckets are topped up with the next shorter rows instead of waited for.
                _top_up(waiting, buckets)
        yield [pack(waiting[b.length][: b.rows], b) for b in buckets]


def _top_up(waiting: dict[int, list[Row]], buckets: tuple[Bucket, ...]) -> None:
    for shorter, longer in pairwise(buckets):
        spare = waiting[shorter.length][shorter.rows :]
        while spare and len(waiting[longer.length]) < longer.rows:
            row = spare.pop()
            waiting[shorter.length].remove(row)
            waiting[longer.length].append(row)


def _work(seed: str, queue: Queue[list[Arrays]], buckets: tuple[Bucket, ...]) -> None:
    for step in steps(seed, buckets):
        queue.put(step)


class StepSource:
    """Worker processes that make steps ahead of time; the order of steps depends on the seed and worker count only."""

    def __init__(self, seed: str, workers: int, buckets: tuple[Bucket, ...] = BUCKETS) -> None:
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue(maxsize=6) for _ in range(workers)]
        self.processes = [
            context.Process(target=_work, args=(f"{seed}/{i}", queue, buckets), daemon=True) for i, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.next = 0

    def take(self, timeout_s: float = 120.0) -> list[Arrays]:
        """The next step; raises queue.Empty if a worker gives none in time."""
        queue = self.queues[self.next % len(self.queues)]
        self.next += 1
        step: list[Arrays] = queue.get(timeout=timeout_s)
        return step

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
