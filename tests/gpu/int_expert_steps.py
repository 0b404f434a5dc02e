"""Layer steps for the GPU expert kernel: made in numpy, computed on a GPU, and expected from the CPU kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.python import cuda_expert
from kernels.python.cuda_expert import CudaExperts, Routing
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from tests.kernels.cases import Bits

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def make_records(shape: ExpertShape, count: int, seed: int) -> Bytes:
    """Seeded records [count, record_bytes]: random trellis bits, suh about +-1, svh so that values keep their size."""
    bits = Bits(seed)
    records = shape.empty_records(count)
    for record in records:
        record[:] = 0
        for name, part in shape.parts().items():
            target = shape.view(record, name)
            if name.endswith("trellis"):
                raw = bits.take((part.nbytes + 3) // 4).view(np.uint16)
                target[...] = raw[: target.size].reshape(target.shape)
                continue
            values = bits.uniform(part.shape)
            size = 0.25 * values if name.endswith("bias") else np.sign(values) * (0.75 + 0.5 * np.abs(values))
            inputs = shape.inter if name.startswith("down") else shape.hidden
            target[...] = (size / np.sqrt(inputs) if name.endswith("svh") else size).astype(np.float16)
    return records


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one layer. selected: int64 [rows, top_k]; x [rows, hidden]; weights [rows, top_k]; shared fp32 [rows, hidden] or None.

    here: which experts the GPU computes, bool [experts].
    """

    x: npt.NDArray[Any]
    selected: npt.NDArray[np.int64]
    weights: npt.NDArray[Any]
    here: npt.NDArray[np.bool_]
    shared: Floats | None = None

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def top_k(self) -> int:
        return self.selected.shape[1]

    def active(self) -> npt.NDArray[np.bool_]:
        """Which picks the GPU computes, [rows * top_k]."""
        picks = self.selected.ravel()
        valid = (picks >= 0) & (picks < len(self.here))
        return valid & self.here[np.where(valid, picks, 0)]


def random_step(
    generator: np.random.Generator, hidden: int, experts: int, rows: int, top_k: int, *, absent: float = 0.0, odd: float = 0.0
) -> Step:
    """A step with distinct picks a row.

    absent: the share of experts that are not on the GPU. odd: the share of picks whose number is no expert.
    """
    dtype = np.float16 if generator.random() < 0.7 else np.float32
    x = generator.standard_normal((rows, hidden)) * 10.0 ** generator.uniform(-2, 1)
    if generator.random() < 0.2:
        x[:, :: int(generator.integers(29, 97))] *= 100.0
    if generator.random() < 0.1:
        x[int(generator.integers(rows)), :128] = 0.0
    popular = generator.dirichlet(np.full(experts, 0.5))
    order = np.argsort(-np.log(generator.random((rows, experts))) / (popular + 1e-9), axis=1)
    selected = order[:, :top_k].astype(np.int64)
    wrong = generator.random(selected.shape) < odd
    selected[wrong] = generator.choice([-1, experts, experts + 7, 1 << 40], int(wrong.sum()))
    weights = generator.uniform(0.0, 0.7, (rows, top_k)).astype(np.float16 if generator.random() < 0.7 else np.float32)
    shared = generator.standard_normal((rows, hidden)).astype(np.float32) if generator.random() < 0.5 else None
    return Step(x.astype(dtype), selected, weights, generator.random(experts) >= absent, shared)


def expected_rows(pool: ExpertPool, shape: ExpertShape, records: Bytes, step: Step) -> Floats:
    """The CPU kernel's rows [rows * top_k, hidden]; 0 where the pick is not active."""
    y = np.zeros((step.rows * step.top_k, shape.hidden), np.float32)
    picks, active = step.selected.ravel(), step.active()
    tasks = []
    for e in np.unique(picks[active]):
        places = np.nonzero(active & (picks == e))[0].astype(np.uint32)
        tasks.append(ExpertTask(shape, records[e], step.x, y, (places // step.top_k).astype(np.uint32), places))
    pool.run(tasks)
    return y


def fma(a: npt.NDArray[Any], b: npt.NDArray[Any], c: npt.NDArray[Any]) -> Floats:
    """fp32 a * b + c with one rounding: the fp64 sum is rounded to odd, which makes the second rounding the only one that counts."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, nudged, total).astype(np.float32)


def expected_out(step: Step, y: Floats) -> Floats:
    """The weighted sum over ascending slots, then plus shared."""
    hidden = y.shape[1]
    out = np.zeros((step.rows, hidden), np.float32)
    rows, active = y.reshape(step.rows, step.top_k, hidden), step.active().reshape(step.rows, step.top_k)
    for k in range(step.top_k):
        added = fma(np.broadcast_to(step.weights[:, k : k + 1].astype(np.float32), out.shape), rows[:, k], out)
        out = np.where(active[:, k : k + 1], added, out)
    return out if step.shared is None else out + step.shared


class DeviceLayer:
    """Records of a layer on the GPU, and steps on them."""

    def __init__(self, shape: ExpertShape, records: Bytes, *, mapped: bool = False, max_picks: int = 128) -> None:
        """mapped: the records stay in pinned host memory and are read in place."""
        self.shape = shape
        host = torch.from_numpy(records)
        self.records = host.pin_memory() if mapped else host.cuda()
        first = self.records.data_ptr()
        self.addresses = torch.tensor([first + e * shape.record_bytes for e in range(len(records))], dtype=torch.int64, device="cuda")
        self.experts = CudaExperts(shape, max_picks, torch.cuda.current_device())

    def routing(self, step: Step, selected_type: int = cuda_expert.INDEX_I64) -> tuple[Routing, list[torch.Tensor]]:
        """The step's picks on the GPU, and the tensors that must outlive their use."""
        table = torch.where(torch.from_numpy(step.here).cuda(), self.addresses, 0)
        index_type = torch.int64 if selected_type == cuda_expert.INDEX_I64 else torch.int32
        selected = torch.from_numpy(step.selected).cuda().to(index_type)
        weights = torch.from_numpy(step.weights).cuda()
        return Routing(
            table.data_ptr(),
            selected.data_ptr(),
            weights.data_ptr(),
            len(step.here),
            step.rows,
            step.top_k,
            selected_type,
            cuda_expert.DTYPE_F16 if step.weights.dtype == np.float16 else cuda_expert.DTYPE_F32,
        ), [table, selected, weights]

    def run(
        self,
        step: Step,
        *,
        serial: bool = False,
        after_kernel: bool = False,
        all_here: bool = False,
        selected_type: int = cuda_expert.INDEX_I64,
    ) -> tuple[Floats, Floats]:
        """(rows [rows * top_k, hidden], sum [rows, hidden]). Rows that the kernel does not write are NaN."""
        routing, keep = self.routing(step, selected_type)
        x = torch.from_numpy(step.x).cuda()
        shared = None if step.shared is None else torch.from_numpy(step.shared).cuda()
        y = torch.full((step.rows * step.top_k, self.shape.hidden), float("nan"), device="cuda")
        out = torch.full((step.rows, self.shape.hidden), float("nan"), device="cuda")
        self.experts.run(
            routing,
            x.data_ptr(),
            y=y.data_ptr(),
            out=out.data_ptr(),
            shared=None if shared is None else shared.data_ptr(),
            x_dtype=cuda_expert.DTYPE_F16 if step.x.dtype == np.float16 else cuda_expert.DTYPE_F32,
            serial=serial,
            after_kernel=after_kernel,
            all_here=all_here,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        torch.cuda.synchronize()
        del keep
        return y.cpu().numpy(), out.cpu().numpy()

    def close(self) -> None:
        self.experts.close()


def differing(found: Floats, expected: Floats) -> int:
    """How many numbers differ in any bit (two NaNs are equal)."""
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    return int((~same).sum())
