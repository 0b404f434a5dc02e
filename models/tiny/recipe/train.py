"""Train the tiny model on the synthetic mixture and save the bf16 source checkpoint.

    python -m models.tiny.recipe.train --out SOURCE [--steps 6000] [--seconds 1000] [--workers 14]

On CUDA every length bucket's forward and backward pass and the optimizer are CUDA graphs. `--seconds` shortens the
schedule when the machine is slower than planned, so that the learning rate always reaches its end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from .batches import BUCKETS, Arrays, Bucket, StepSource
from .checkpoint_io import new_model, save_source
from .devset import DevSet
from .forward import Precision, logits_at

PEAK_LR = 2e-3
BIAS_RATE = 1e-3
NOISE = 0.08
"""Weight noise at the end of training, relative: about two thirds of the error that 3-bit conversion leaves."""


class Schedule:
    """Learning rate and weight noise from progress in [0, 1]."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        return max(step / self.steps, (time.monotonic() - self.start) / self.seconds)

    @staticmethod
    def learning_rate(progress: float, step: int, peak: float) -> float:
        return peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    @staticmethod
    def noise(progress: float) -> float:
        return NOISE * min(1.0, max(0.0, (progress - 0.3) / 0.4))


class BucketPass:
    """Forward and backward of one bucket; on CUDA captured once and replayed."""

    def __init__(self, trainer: Trainer, bucket: Bucket) -> None:
        self.trainer = trainer
        device = trainer.device
        self.inputs = {
            "ids": torch.zeros(bucket.rows, bucket.length, dtype=torch.int64, device=device),
            "positions": torch.zeros(bucket.targets, dtype=torch.int64, device=device),
            "labels": torch.zeros(bucket.targets, dtype=torch.int64, device=device),
            "weights": torch.zeros(bucket.targets, device=device),
        }
        self.graph: Any = None

    def compute(self) -> None:
        t = self.trainer
        logits = logits_at(t.model, self.inputs["ids"], self.inputs["positions"], t.precision, t.loads)
        losses = F.cross_entropy(logits, self.inputs["labels"], reduction="none") * self.inputs["weights"]
        loss = losses.sum()
        (loss * t.inverse_total).backward()
        t.loss_sum += loss.detach()
        right = (logits.detach().argmax(-1) == self.inputs["labels"]).float() * self.inputs["weights"]
        t.right_sum += right.sum()

    def capture(self, pool: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.compute()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.compute()

    def run(self, arrays: Arrays) -> None:
        for name, target in self.inputs.items():
            source = torch.from_numpy(arrays[name])
            if target.is_cuda:
                source = source.pin_memory()
            target.copy_(source, non_blocking=True)
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()


class Trainer:
    """Model, optimizer and the static tensors that the captured passes share."""

    def __init__(self, device: str, buckets: tuple[Bucket, ...], peak_lr: float, seed: int) -> None:
        self.device = device
        self.model = new_model(seed).to(device)
        self.model.model.visual.requires_grad_(False)
        for layer in self.model.model.language_model.layers:
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.indexer.requires_grad_(False)  # selects everything below index_topk: no gradient
        self.routers = [m.mlp.gate for m in self.model.model.language_model.layers if hasattr(m.mlp, "gate")]
        self.loads = [torch.zeros(r.num_experts, device=device) for r in self.routers]
        self.noise = torch.zeros((), device=device)
        cuda = device == "cuda"
        self.precision = Precision(torch.bfloat16 if cuda else torch.float32, self.noise)
        self.inverse_total = torch.ones((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.right_sum = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        self.rate = torch.zeros((), device=device)
        self.peak_lr = peak_lr
        params = [p for p in self.model.parameters() if p.requires_grad]
        for p in params:
            p.grad = torch.zeros_like(p)
        self.params = params
        matrices = [p for p in params if p.dim() >= 2]
        vectors = [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=cuda, capturable=cuda)
        self.passes = [BucketPass(self, b) for b in buckets]
        self.update_graph: Any = None

    def update(self) -> None:
        """Clip, step, balance the routers, clear the gradients."""
        self.grad_norm.copy_(torch.nn.utils.clip_grad_norm_(self.params, 1.0))
        self.optimizer.step()
        for p in self.params:
            if p.grad is not None:
                p.grad.zero_()
        for router, load in zip(self.routers, self.loads, strict=True):
            # noaux_tc: the bias of an expert moves against its load, no loss term is involved.
            router.e_score_correction_bias += BIAS_RATE / self.peak_lr * self.rate * torch.sign(load.mean() - load)

    def capture(self) -> None:
        """Capture all passes; the warm-up's gradients are discarded and the weights stay as they are."""
        pool = torch.cuda.graph_pool_handle()
        for p in reversed(self.passes):  # the largest first, so that the pool fits the rest
            p.capture(pool)
        for p in self.params:
            p.grad.zero_()
        self.rate.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.update()  # a step with learning rate 0 creates the optimizer's state
        torch.cuda.current_stream().wait_stream(stream)
        self.update_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.update_graph):
            self.update()

    def step(self, arrays: list[Arrays], rate: float, noise: float) -> int:
        """One optimizer step; returns how many tokens were trained on."""
        total = int(sum(a["weights"].sum() for a in arrays))
        self.inverse_total.fill_(1.0 / total)
        self.rate.fill_(rate)
        self.noise.fill_(noise)
        for load in self.loads:
            load.zero_()
        for bucket_pass, batch in zip(self.passes, arrays, strict=True):
            bucket_pass.run(batch)
        if self.update_graph is None:
            self.update()
        else:
            self.update_graph.replay()
        return total


def train(arguments: argparse.Namespace, buckets: tuple[Bucket, ...] = BUCKETS) -> Any:
    """Run the schedule; returns the trained model (fp32)."""
    source = StepSource(f"train-{arguments.seed}", arguments.workers, buckets)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    dev = DevSet(arguments.dev_per_kind)
    trainer = Trainer(device, buckets, arguments.lr, arguments.seed)
    if device == "cuda":
        begin = time.monotonic()
        trainer.capture()
        print(f"captured in {time.monotonic() - begin:.1f} s", flush=True)
    schedule = Schedule(arguments.steps, arguments.seconds)
    tokens = seen = step = 0
    next_eval = arguments.eval_every
    while (progress := schedule.progress(step)) < 1.0:
        rate = schedule.learning_rate(progress, step, arguments.lr)
        seen += trainer.step(source.take(), rate, schedule.noise(progress))
        tokens += sum(b.rows * b.length for b in buckets)
        step += 1
        if step % arguments.log_every == 0:
            elapsed = time.monotonic() - schedule.start
            loss, right = trainer.loss_sum.item() / seen, trainer.right_sum.item() / seen
            balance = max((load.max() / load.mean()).item() for load in trainer.loads)
            idle = sum(int((load == 0).sum()) for load in trainer.loads)
            print(f"{elapsed:.0f} s step {step} ({tokens / elapsed / 1e3:.0f}k tok/s) loss {loss:.4f} right {right:.4f} "
                  f"norm {trainer.grad_norm.item():.2f} load max/mean {balance:.1f} idle {idle} lr {rate:.2e}", flush=True)  # fmt: skip
            if not math.isfinite(loss):
                raise RuntimeError(f"training diverged at step {step}: loss {loss}; lower --lr")
            trainer.loss_sum.zero_()
            trainer.right_sum.zero_()
            seen = 0
        if time.monotonic() - schedule.start > next_eval:
            next_eval += arguments.eval_every
            print(json.dumps(dev.score(trainer.model, device)), flush=True)
    source.stop()
    print(json.dumps({"final": dev.score(trainer.model, device), "steps": step, "tokens": tokens}), flush=True)
    return trainer.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the bf16 source checkpoint")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seconds", type=float, default=1000.0, help="upper bound of the training time")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--lr", type=float, default=PEAK_LR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=float, default=90.0, help="seconds between dev-set scores")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--dev-per-kind", type=int, default=24)
    arguments = parser.parse_args()
    save_source(train(arguments).cpu(), arguments.out)


if __name__ == "__main__":
    main()
