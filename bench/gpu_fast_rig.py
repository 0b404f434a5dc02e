"""The GPU's side of `bench.gpu_fast`: stores over one loaded model, forced decode, noise in the experts, a cpu_expert process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, stock_error
from bench.backend_info import gpu_info
from bench.fast_fidelity import Run, Setting
from kernels.python import segments
from kernels.python.cuda_expert import CudaExperts, Routing
from kernels.python.fast_pager import FastCosts, FastOptions
from kernels.python.pager import PagerPolicy
from kernels.python.region import Region
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.fast import FastSetup, FastSteps
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.patches.replace import Replacements

Group = list[list[int]]  # prompts that are decoded together
LANE_WAIT_S = 60.0
FACTS = ("decode_steps", "picks", "experts", "evictions", "recomputed_picks", "aborts", "cpu_expert_bytes", "planner_error_pct")
# Where records are while stock's error is measured.
ERROR_SETTINGS = {
    "in place": Setting("exact, in place", fast=False, slots=0.0, placed=0.0, on_demand=False, admit=False),
    "in slots": Setting("exact, in slots", fast=False, slots=1.0, placed=1.0, on_demand=False, admit=False),
    "after the step": Setting("exact, after the step", fast=False),
}


class LaneProcess:
    """A cpu_expert process for an instance."""

    def __init__(self, instance: str, shm_dir: str, threads: int) -> None:
        self._env = {**os.environ, "GLM53_INSTANCE": instance, "GLM53_SHM_DIR": shm_dir, "GLM53_CT_THREADS": str(threads)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; a running one stays."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "services.cpu_expert"]
            self._process = subprocess.Popen(command, env=self._env, cwd=report.ROOT, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=20)

    @property
    def pid(self) -> int:
        """Of the running process, 0 for none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return cpu_seconds(self._process.pid) if self._process is not None else 0.0

    def close(self) -> None:
        """Ends it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)
            if self._process.poll() is None:
                self.kill()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class GpuRig:
    """Settings over one loaded model.

    Args:
        loaded: the model.
        top_k: picks of a token.
        vocab: its tokens.
        instance: names the control region; the arena is that of the same instance.
        lane: its cpu_expert.
        deadline: monotonic seconds; what would begin later is left out.
    """

    def __init__(
        self, loaded: loader.Loaded, top_k: int, vocab: int, instance: str, lane: LaneProcess, deadline: float, shm_dir: str = "/dev/shm"
    ) -> None:
        self.loaded, self.top_k, self.vocab, self.lane, self.deadline = loaded, top_k, vocab, lane, deadline
        self._ctl_path = segments.ctl_path(shm_dir, instance)

    @property
    def num_records(self) -> int:
        """Experts of all layers."""
        return self.loaded.records.num_records

    def time_left(self) -> bool:
        """False when nothing more should begin."""
        return time.monotonic() < self.deadline

    def fits(self, seconds: float) -> bool:
        """False when something of so many seconds would end too late."""
        return time.monotonic() + seconds < self.deadline

    @contextlib.contextmanager
    def backend(self, setting: Setting) -> Iterator[Exl3Backend]:
        """A backend over slots as the setting has them; the lane is up when it wants one."""
        slots = max(1, round(setting.slots * self.num_records))
        policy = PagerPolicy(admit_after=1, link_derate=setting.link_derate, hint_records=setting.hint_records)
        fast = None
        if setting.fast:
            region = Region.create(self._ctl_path, self.loaded.records.arena, top_k=self.top_k) if setting.lane else None
            fast = FastSetup(region, FastOptions(FastCosts()))
        options = ExpertOptions(
            PlacementOptions(admit_after=1), admit=setting.admit, on_demand=setting.on_demand and not setting.fast, pager=policy, fast=fast
        )
        with Replacements() as into:
            store = loader.make_store(self.loaded, slots, self.top_k, options, into)
            try:
                placed = min(slots, round(setting.placed * self.num_records))
                store.place(loader.spread(placed, self.num_records) if placed else ())
                self._prepare(store, setting)
                with Noise(self.loaded, self.top_k, setting.noise, setting.seed):
                    info = gpu_info(self.vocab, 2048, 8, 2048, "fast" if setting.fast else "exact")
                    yield Exl3Backend(self.loaded.model, self.loaded.cache, store, self.loaded.records, Replacements(), info)
            finally:
                torch.cuda.synchronize()
                store.close()

    def _prepare(self, store: ExpertStore, setting: Setting) -> None:
        steps = store._fast
        if steps is None:
            return
        steps.force(setting.forced, setting.seed)
        if setting.lane:
            self.lane.start()
            wait_for(lambda: steps.lane_up, "cpu_expert does not attach")

    def forced(self, setting: Setting, groups: list[Group], continuations: list[list[list[int]]] | None, steps: int) -> tuple[Run, Any]:
        """Decodes every group for so many steps: (logits, tokens that were fed: [group][stream][step]).

        Args:
            continuations: the tokens to feed; None: each stream's own most likely ones.
        """
        logits: list[Any] = []
        prompts: list[int] = []
        fed: list[list[list[int]]] = []
        with self.backend(setting) as backend:
            faults = Faults(self.lane, setting.restarts, backend.experts._fast)
            with faults:
                number = 0
                for index, group in enumerate(groups):
                    if setting.restarts and (fast := backend.experts._fast) is not None:
                        wait_for(lambda fast=fast: fast.lane_up, "cpu_expert does not come back")  # type: ignore[misc]
                    rows = self._group(backend, group, None if continuations is None else continuations[index], steps)
                    for step_logits, _ in rows:
                        logits += list(step_logits)
                        prompts += range(number, number + len(group))
                    fed.append([[tokens[stream] for _, tokens in rows] for stream in range(len(group))])
                    number += len(group)
            stats = backend.stats()
        facts = {name: stats[name] for name in FACTS if name in stats}
        return Run(logits, prompts, {**facts, "restarts": faults.done}), fed

    def stock_error(self, group: Group, most: int = 24, *, how: str = "in place") -> dict[str, Any]:
        """How far stock's experts and ours are from fp64, on inputs of real steps: stock_error.summarise's row.

        Args:
            most: entries (one layer of one step).
            how: where records are: `in place`, `in slots`, or `after the step`: copied within the steps, whose tables are over by then. The
                last one shows what a stale table makes; it measures no kernel.
        """
        setting = ERROR_SETTINGS[how]
        seen: list[stock_error.Step] = []
        with self.backend(setting) as backend:
            stock = {layer.index: stock_error.keep_steps(layer, seen) for layer in self.loaded.layers}
            self._group(backend, group, None, 3)
            with torch.inference_mode():
                meter = stock_error.Meter(self.loaded.records, self._rows_of_ours)
                entries = [meter.entry(step, stock[step.layer.index]) for step in stock_error.thinned(seen, most)]
        return stock_error.summarise(entries)

    def _rows_of_ours(self, step: stock_error.Step) -> stock_error.Wide:
        records, rows = self.loaded.records, len(step.x)
        shape, device = records.shapes[step.layer.index], self.loaded.table.device
        y = torch.zeros((rows * self.top_k, shape.hidden), device=device)
        addresses = torch.from_numpy(records.addresses(step.layer.index)).to(device)
        with CudaExperts(shape, rows * self.top_k, device.index or 0) as kernels:
            routing = Routing(
                addresses.data_ptr(), step.selected.data_ptr(), step.weights.data_ptr(), records.num_experts, rows, self.top_k
            )
            kernels.run(routing, step.x.data_ptr(), y=y.data_ptr(), stream=torch.cuda.current_stream().cuda_stream)
            return np.asarray(y.double().cpu().numpy().reshape(rows, self.top_k, shape.hidden), np.float64)

    def _group(self, backend: Exl3Backend, group: Group, tokens: list[list[int]] | None, steps: int) -> list[tuple[Any, list[int]]]:
        streams = [backend.open_stream() for _ in group]
        for stream, prompt in zip(streams, group, strict=True):
            backend.prefill(stream, prompt[:-1], all_logits=False)
        now = [prompt[-1] for prompt in group]
        rows = []
        for step in range(steps):
            logits = backend.decode(streams, now)
            now = [int(row.argmax()) for row in logits] if tokens is None else [stream[step] for stream in tokens]
            rows.append((logits, now))
        for stream in streams:
            backend.close_stream(stream)
        return rows


class Faults:
    """Kills cpu_expert in mid-run and starts another, so many times."""

    def __init__(self, lane: LaneProcess, times: int, steps: FastSteps | None) -> None:
        self._lane, self._times, self._steps = lane, times, steps
        self.done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self.done < self._times and self._steps is not None and not self._stop.wait(0.05):
            if not self._steps.lane_up:
                continue
            self._lane.kill()
            self.done += 1
            self._lane.start()

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        if self._times:
            self._lane.start()


class Noise:
    """Adds Gaussian noise to the routed sum of exllamav3's decode steps.

    As much as noise of relative RMS `level` in each expert's row makes of it. The rows' sizes come from the integer kernels, which read the
    records in place.
    """

    def __init__(self, loaded: loader.Loaded, top_k: int, level: float, seed: int) -> None:
        self._loaded, self._top_k, self._level = loaded, top_k, level
        self._generator = torch.Generator(device=loaded.table.device).manual_seed(seed)
        self._undo: list[Callable[[], None]] = []
        self._kernels: dict[bytes, CudaExperts] = {}

    def __enter__(self) -> Noise:
        if self._level > 0:
            for layer in self._loaded.layers:
                self._wrap(layer)
        return self

    def _wrap(self, layer: Any) -> None:
        compiled, records = layer.mlp.bc, self._loaded.records
        shape, device = records.shapes[layer.index], self._loaded.table.device
        key = bytes(shape)
        if key not in self._kernels:
            self._kernels[key] = CudaExperts(shape, 8 * self._top_k, device.index or 0)
        kernels, stock, out = self._kernels[key], compiled.run_bszN, layer.mlp.experts_cfg.out_bszn
        addresses = torch.from_numpy(records.addresses(layer.index)).to(device)
        y = torch.zeros((8 * self._top_k, shape.hidden), device=device)

        def noisy(x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
            stock(x, selected, weights)
            rows = len(x)
            routing = Routing(addresses.data_ptr(), selected.data_ptr(), weights.data_ptr(), records.num_experts, rows, self._top_k)
            kernels.run(routing, x.data_ptr(), y=y.data_ptr(), stream=torch.cuda.current_stream().cuda_stream)
            power = y[: rows * self._top_k].square().mean(1).view(rows, self._top_k)
            spread = self._level * (weights.float().square() * power).sum(1).sqrt()
            noise = torch.randn((rows, shape.hidden), device=device, generator=self._generator)
            out[:rows] += spread[:, None] * noise

        compiled.run_bszN = noisy
        self._undo.append(lambda: setattr(compiled, "run_bszN", stock))

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for undo in self._undo:
            undo()
        for kernels in self._kernels.values():
            kernels.close()


def wait_for(condition: Callable[[], bool], problem: str) -> None:
    """Polls; raises TimeoutError with the problem's name."""
    deadline = time.monotonic() + LANE_WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(0.01)


def prompts(path: Path, count: int, seed: int) -> Group:
    """Questions of the shipped model's kind as token ids, of many lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    names = ("France", "Italy", "Japan", "Egypt", "Kenya", "Norway", "Peru", "Chile", "Spain", "Poland")
    kinds = (
        "What is the capital of {name}?", "What is {a} + {b}?", "Hello, who are you?", "Reverse the word {name}.",
        "Give me JSON with the capital of {name}.", "What is {a} minus {b}?", "Is {a} larger than {b}? What about {name}?",
    )  # fmt: skip
    out = []
    for index in range(count):
        text = kinds[index % len(kinds)].format(name=names[int(rng.integers(len(names)))], a=rng.integers(10, 99), b=rng.integers(10, 99))
        ids = tokenizer.encode(f"[gMASK]<sop><|user|>{text}<|assistant|><think></think>", add_special_tokens=False).ids
        out.append(list(ids))
    return out
