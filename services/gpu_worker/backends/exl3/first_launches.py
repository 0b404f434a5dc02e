"""The first launches of the integer expert kernels, and what they take.

A first launch may wait for the device. While a decode step waits for the pager that would be a deadlock, so every kernel runs once before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.python import cuda_expert
from kernels.python.cuda_expert import CudaExperts, Routing

_RUNS = 20


class FirstLaunches:
    """Steps whose results nobody reads.

    Args:
        rows: most rows of a step.
        top_k: picks of a row.
        hidden: the model's width.
        y: float32 [rows * top_k, hidden] on the device.
        stream: where they run; the current one.
    """

    def __init__(self, rows: int, top_k: int, hidden: int, y: torch.Tensor, stream: int) -> None:
        device = y.device
        self._rows, self._top_k, self._hidden, self._y, self._stream = rows, top_k, hidden, y, stream
        self._selected = torch.arange(top_k, device=device).repeat(rows, 1).contiguous()
        self._weights = torch.zeros((rows, top_k), dtype=torch.float16, device=device)
        self._x = torch.zeros((rows, hidden), dtype=torch.float16, device=device)
        self._out = torch.zeros((rows, hidden), dtype=torch.float32, device=device)
        self._records = torch.zeros(top_k, dtype=torch.int64, device=device)

    def _routing(self, rows: int) -> Routing:
        return Routing(self._records.data_ptr(), self._selected.data_ptr(), self._weights.data_ptr(), self._top_k, rows, self._top_k)

    def publish(self, picks_to: int, word: int, arrivals: torch.Tensor) -> None:
        """The publishing kernel, and the combining one. picks_to, word: device addresses of mapped host memory that nobody reads yet."""
        routing = self._routing(self._rows)
        cuda_expert.publish(
            routing, self._hidden, selected_to=picks_to, word=word, value=0, arrivals=arrivals.data_ptr(), stream=self._stream
        )
        cuda_expert.combine(routing, self._hidden, self._y.data_ptr(), self._out.data_ptr(), stream=self._stream)

    def run(self, kernels: CudaExperts) -> None:
        """Every kernel of a handle: few and many rows, with another lane (rows alone) and without (their sum). No record is read."""
        for rows in sorted({1, self._rows}):
            kernels.run(self._routing(rows), self._x.data_ptr(), out=self._out.data_ptr(), all_here=True, stream=self._stream)
            kernels.run(self._routing(rows), self._x.data_ptr(), y=self._y.data_ptr(), stream=self._stream)
        torch.cuda.synchronize(self._y.device)

    def time(self, kernels: CudaExperts, slots: Sequence[int]) -> tuple[float, float]:
        """Microseconds of a step's kernels: (fixed, for each expert), from steps of one row with one expert and with top_k.

        Args:
            slots: top_k device addresses of records; their bytes may be anything.
        """
        one, many = (self._time(kernels, slots[:count]) for count in (1, self._top_k))
        each = max((many - one) / max(self._top_k - 1, 1), 0.0)
        return max(one - each, 0.0), each

    def _time(self, kernels: CudaExperts, slots: Sequence[int]) -> float:
        self._records.zero_()
        self._records[: len(slots)] = torch.tensor(slots, dtype=torch.int64, device=self._y.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for run in range(_RUNS + 1):
            if run == 1:
                begin.record()
            kernels.run(self._routing(1), self._x.data_ptr(), out=self._out.data_ptr(), stream=self._stream)
        end.record()
        torch.cuda.synchronize(self._y.device)
        return 1000 * float(begin.elapsed_time(end)) / _RUNS
