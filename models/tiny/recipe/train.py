"""Train the tiny model on the synthetic mixture and save the bf16 source checkpoint.

    python -m models.tiny.recipe.train --out SOURCE [--steps 6000] [--seconds 1000] [--workers 14] [--resume CHECKPOINT]

On CUDA every length bucket's forward and backward pass and the optimizer are CUDA graphs. `--seconds` shortens the
schedule when the machine is slower than planned, so that the learning rate always reaches its end. Started by
`python -m torch.distributed.run --nproc-per-node N`, N GPUs share the steps: each has its own data, gradients are averaged.
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
from torch import Tensor, nn

from .batches import BUCKETS, Arrays, Bucket, StepSource
from .checkpoint_io import new_model, save_source
from .devset import DevSet
from .forward import Ops, Precision, logits_at
from .ranks import Ranks

PEAK_LR = 2e-3
BIAS_RATE = 1e-3
NOISE = 0.09
"""Weight noise at the end of training, relative: about two thirds of the error that 3-bit conversion leaves."""


class Schedule:
    """Learning rate and weight noise from progress in [0, 1]."""

    def __init__(self, steps: int, seconds: float, ranks: Ranks) -> None:
        self.steps, self.seconds, self.ranks = steps, seconds, ranks
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        return self.ranks.agree(max(step / self.steps, (time.monotonic() - self.start) / self.seconds))

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

    def __init__(
        self,
        device: str,
        buckets: tuple[Bucket, ...],
        peak_lr: float,
        model: nn.Module,
        ops: Ops | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.device = device
        self.ranks = ranks or Ranks()
        self.model: Any = model.to(device)
        self.model.model.visual.requires_grad_(False)
        for layer in self.model.model.language_model.layers:
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.indexer.requires_grad_(False)  # selects everything below index_topk: no gradient
        self.routers = [m.mlp.gate for m in self.model.model.language_model.layers if hasattr(m.mlp, "gate")]
        self.loads = [torch.zeros(r.num_experts, device=device) for r in self.routers]
        self.noise = torch.zeros((), device=device)
        cuda = device == "cuda"
        self.precision = Precision(torch.bfloat16 if cuda else torch.float32, ops or Ops())
        self.copies: list[tuple[Tensor, Tensor, bool]] = []
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
        self.prepare_graph: Any = None
        self.update_graph: Any = None

    def make_copies(self) -> None:
        """Give every matrix that the forward pass uses a copy in the compute dtype; its gradient gathers there."""
        self.passes[0].compute()
        for number, (parameter, quantised) in self.precision.touched.items():
            copy = parameter.detach().to(self.precision.dtype).requires_grad_()
            copy.grad = torch.zeros_like(copy)
            self.precision.prepared[number] = copy
            self.copies.append((parameter, copy, quantised))

    @torch.no_grad()
    def prepare(self) -> None:
        """Refresh the copies, with noise on those that the conversion quantises."""
        for parameter, copy, quantised in self.copies:
            if quantised:
                dims = (-2, -1)
                noise = torch.randn_like(parameter) * (parameter.std(dim=dims, keepdim=True) * self.noise)
                copy.copy_(parameter + noise)
            else:
                copy.copy_(parameter)

    def update(self) -> None:
        """Clip, step, balance the routers, clear the gradients."""
        for parameter, copy, _ in self.copies:
            if parameter.grad is not None and copy.grad is not None:
                parameter.grad.copy_(copy.grad)
                copy.grad.zero_()
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
        self.make_copies()
        pool = torch.cuda.graph_pool_handle()
        for p in reversed(self.passes):  # the largest first, so that the pool fits the rest
            p.capture(pool)
        for p in self.params:
            p.grad.zero_()
        for _, copy, _ in self.copies:
            if copy.grad is not None:
                copy.grad.zero_()
        self.rate.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.prepare()
            self.update()  # a step with learning rate 0 creates the optimizer's state
        torch.cuda.current_stream().wait_stream(stream)
        self.update_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.update_graph):
            self.update()
        self.prepare_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.prepare_graph):
            self.prepare()

    def step(self, arrays: list[Arrays], rate: float, noise: float) -> int:
        """One optimizer step; returns how many tokens were trained on."""
        total = int(sum(a["weights"].sum() for a in arrays))
        self.inverse_total.fill_(1.0 / total)
        self.rate.fill_(rate)
        self.noise.fill_(noise)
        for load in self.loads:
            load.zero_()
        if self.prepare_graph is None:
            self.prepare()
        else:
            self.prepare_graph.replay()
        for bucket_pass, batch in zip(self.passes, arrays, strict=True):
            bucket_pass.run(batch)
        self.ranks.average([*(c.grad for _, c, _ in self.copies if c.grad is not None), *self.own_gradients()])
        self.ranks.average(self.loads)
        if self.update_graph is None:
            self.update()
        else:
            self.update_graph.replay()
        return total

    def own_gradients(self) -> list[Tensor]:
        """Gradients that gather on the parameters themselves, not on a copy of them."""
        copied = {id(parameter) for parameter, _, _ in self.copies}
        return [p.grad for p in self.params if id(p) not in copied and p.grad is not None]


def first_model(arguments: argparse.Namespace) -> nn.Module:
    """A fresh model, or the dequantised weights of an EXL3 checkpoint to go on from."""
    model: nn.Module = new_model(arguments.seed)
    if arguments.resume is not None:
        from services.gpu_worker.checkpoint import Checkpoint

        from .exl3_state import head_weight, text_state

        checkpoint = Checkpoint(arguments.resume)
        state = {"model.language_model." + name: tensor for name, tensor in text_state(checkpoint).items()}
        missing, unexpected = model.load_state_dict({**state, "lm_head.weight": head_weight(checkpoint)}, strict=False)
        if unexpected or any(not name.startswith("model.visual.") for name in missing):
            raise ValueError(f"{arguments.resume} is another model: missing {missing}, unexpected {unexpected}")
    return model


def captured_trainer(buckets: tuple[Bucket, ...], arguments: argparse.Namespace, ranks: Ranks) -> Trainer:
    """A trainer with captured passes, its element-wise pieces compiled if that works here and agrees."""
    begin = time.monotonic()
    if arguments.compile:
        try:
            trainer = Trainer("cuda", buckets, arguments.lr, first_model(arguments), Ops.compiled(), ranks)
            check_compiled(trainer)
            trainer.capture()
            print(f"compiled and captured in {time.monotonic() - begin:.1f} s", flush=True)
            return trainer
        except Exception as error:  # noqa: BLE001  (any compiler failure: the plain pieces are only slower)
            print(f"without compilation, because of {type(error).__name__}: {str(error)[:500]}", flush=True)
    trainer = Trainer("cuda", buckets, arguments.lr, first_model(arguments), ranks=ranks)
    trainer.capture()
    print(f"captured in {time.monotonic() - begin:.1f} s", flush=True)
    return trainer


def check_compiled(trainer: Trainer) -> None:
    """Raise ArithmeticError if compiled pieces give another loss or gradient than plain ones."""
    torch.manual_seed(1)
    ids = torch.randint(0, 2500, (8, 128), device=trainer.device)
    positions = torch.arange(1024, device=trainer.device)
    results = []
    for ops in (Ops(), trainer.precision.ops):
        for p in trainer.params:
            p.grad.zero_()
        logits = logits_at(trainer.model, ids, positions, Precision(trainer.precision.dtype, ops))
        loss = F.cross_entropy(logits, ids.flatten())
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trainer.params]).norm()
        results.append((loss.item(), norm.item()))
    (loss_a, norm_a), (loss_b, norm_b) = results
    print(f"plain: loss {loss_a:.5f} gradient {norm_a:.4f}; compiled: loss {loss_b:.5f} gradient {norm_b:.4f}", flush=True)
    if abs(loss_a - loss_b) > 0.01 or abs(norm_a - norm_b) > 0.03 * norm_a:
        raise ArithmeticError("compiled pieces disagree with the plain ones")


def train(arguments: argparse.Namespace, buckets: tuple[Bucket, ...] = BUCKETS) -> Any:
    """Run the schedule; returns the trained model (fp32), None on every process but the first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stream = Ranks.announced()
    source = StepSource(f"train-{arguments.seed}" + (f"/{stream.rank}" if stream.count > 1 else ""), arguments.workers, buckets)
    ranks = Ranks.from_environment(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    dev = DevSet(arguments.dev_per_kind)
    if device == "cuda":
        trainer = captured_trainer(buckets, arguments, ranks)
    else:
        trainer = Trainer(device, buckets, arguments.lr, first_model(arguments), ranks=ranks)
    ranks.agree(0.0)  # the clock of the schedule starts when the slowest one is ready
    schedule = Schedule(arguments.steps, arguments.seconds, ranks)
    tokens = seen = step = 0
    next_eval = arguments.eval_every
    while (progress := schedule.progress(step)) < 1.0:
        rate = schedule.learning_rate(progress, step, arguments.lr)
        seen += trainer.step(source.take(), rate, schedule.noise(progress))
        tokens += sum(b.rows * b.length for b in buckets) * ranks.count
        step += 1
        if step % arguments.log_every == 0 and ranks.rank == 0:
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
        if time.monotonic() - schedule.start > next_eval and ranks.rank == 0:
            next_eval += arguments.eval_every
            print(json.dumps(dev.score(trainer.model, device)), flush=True)
    source.stop()
    if ranks.rank != 0:
        return None
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
    parser.add_argument("--resume", type=Path, help="EXL3 checkpoint of this model to go on from; a new model without it")
    parser.add_argument("--eval-every", type=float, default=90.0, help="seconds between dev-set scores")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--dev-per-kind", type=int, default=24)
    parser.add_argument("--compile", action="store_true", help="fuse element-wise pieces with torch.compile")
    arguments = parser.parse_args()
    model = train(arguments)
    if model is not None:
        save_source(model.cpu(), arguments.out)


if __name__ == "__main__":
    main()
