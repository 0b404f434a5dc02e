import argparse
import json
import os
import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402, N812

from models.tiny.recipe import kernels, train  # noqa: E402
from models.tiny.recipe.batches import Bucket, steps  # noqa: E402
from models.tiny.recipe.checkpoint_io import mtp_tensors, new_model  # noqa: E402
from models.tiny.recipe.config import LAYER_TYPES  # noqa: E402
from models.tiny.recipe.forward import Ops, Precision, logits_at  # noqa: E402
from models.tiny.recipe.ranks import Ranks  # noqa: E402
from models.tiny.recipe.render import CHECKPOINT  # noqa: E402
from models.tiny.recipe.train import Trainer, first_model  # noqa: E402
from services.gpu_worker.checkpoint import Checkpoint  # noqa: E402
from tests.support.transformers_oracle import Oracle  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    """A stock model whose every parameter matters: norms, biases and mixing weights moved off their initial values."""
    torch.set_num_threads(1)
    stock = new_model(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.dim() > 1 and "visual" not in name:
                parameter.mul_(2.5)
            elif "norm" in name or name.endswith((".base", ".scale")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for layer in stock.model.language_model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.e_score_correction_bias.normal_(0, 0.02, generator=generator)
    stock.set_experts_implementation("eager")
    return stock


def test_forward_and_gradients_equal_transformers(model):
    """The training forward gives transformers' logits and the same gradient for every parameter that has one."""
    ids = torch.randint(0, 2500, (2, 48), generator=torch.Generator().manual_seed(2))
    labels = ids.flatten().roll(-1)

    def run(forward):
        model.zero_grad()
        logits = forward().flatten(0, -2)
        F.cross_entropy(logits, labels).backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    stock, stock_grads = run(lambda: model(input_ids=ids).logits)
    ours, our_grads = run(lambda: logits_at(model, ids, torch.arange(96), Precision()))
    assert (stock - ours).abs().max() < 1e-4
    assert stock_grads.keys() == our_grads.keys()
    for name, gradient in stock_grads.items():
        assert (gradient - our_grads[name]).norm() <= 1e-3 * gradient.norm() + 1e-9, name


def test_padding_on_the_right_changes_nothing(model):
    """Logits of a row do not depend on what stands behind it."""
    ids = torch.randint(0, 2500, (1, 64), generator=torch.Generator().manual_seed(3))
    other = ids.clone()
    other[:, 40:] = 7
    positions = torch.arange(40)
    with torch.no_grad():
        assert torch.equal(logits_at(model, ids, positions, Precision()), logits_at(model, other, positions, Precision()))


def test_unit_lower_inverse():
    """The product form inverts I - A, and its gradient is autograd's of the general inverse."""
    a = (torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(4)) * 0.3).tril(-1).requires_grad_()
    other = a.detach().clone().requires_grad_()
    weight = torch.randn(3, 16, 16)
    ours = kernels.UnitLowerInverse.apply(a)
    reference = torch.linalg.inv(torch.eye(16) - other)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    (ours * weight).sum().backward()
    (reference * weight).sum().backward()
    torch.testing.assert_close(a.grad, other.grad.tril(-1), rtol=1e-3, atol=1e-3)


def test_chunk_scan_gradient():
    """The hand-written backward of the chunk scan agrees with finite differences."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 2, 4, 5), (3, 2, 4, 5), (3, 2, 4, 5), (3, 2, 5)]
    inputs = [torch.rand(s, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_() for s in shapes]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.autograd.gradcheck(kernels.ChunkScan.apply, inputs)
    finally:
        torch.set_default_dtype(default)


def test_mtp_layer_is_complete():
    """The MTP layer stands behind the last layer and has its own experts."""
    names = mtp_tensors()
    assert all(name.startswith(f"model.language_model.layers.{len(LAYER_TYPES)}.") for name in names)
    assert sum(".experts." in name for name in names) == 24 * 3


@pytest.mark.gpu
def test_gpu_kernels_equal_their_references():
    """Triton kernels give the references' values and gradients; compiled pieces are the plain ones."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    generator = torch.Generator().manual_seed(6)
    pre, post = torch.rand(70, 4, generator=generator), torch.rand(70, 4, generator=generator)
    comb = torch.softmax(torch.randn(70, 4, 4, generator=generator) * 2, -1) + 1e-6
    y, streams = torch.randn(70, 256, generator=generator), torch.randn(70, 4, 256, generator=generator)
    cases = [
        (lambda c: kernels.sinkhorn(c, 20, 1e-6), lambda c: kernels.sinkhorn_reference(c, 20, 1e-6), [comb]),
        (kernels.collapse, kernels.collapse_reference, [pre, streams]),
        (kernels.expand, kernels.expand_reference, [post, comb, y, streams]),
    ]
    for fast, reference, values in cases:
        outputs = []
        for function in (fast, reference):
            leaves = [v.cuda().requires_grad_() for v in values]
            result = function(*leaves)
            (result * torch.linspace(-1, 1, result.numel(), device="cuda").view_as(result)).sum().backward()
            outputs.append([result, *(leaf.grad for leaf in leaves)])
        for one, two in zip(*outputs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert Ops.compiled().rms_norm is not Ops().rms_norm


SMALL = (Bucket(64, 3, 64), Bucket(128, 2, 64))


def _first_step(ranks, results):
    torch.set_num_threads(1)
    trainer = Trainer("cpu", SMALL, 1e-3, new_model(0), ranks=ranks)
    trainer.step(next(steps(f"ranks-{ranks.rank}", SMALL)), 1e-3, 0.0)
    results[ranks.rank] = torch.cat([p.detach().reshape(-1) for p in trainer.params]), torch.stack(trainer.loads)


def _rank(rank, port, results):
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _first_step(Ranks.from_environment("cpu"), results)


def test_two_processes_take_one_step():
    """Each has its own data; afterwards both have the same weights, which are not those that either finds alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        processes = [context.Process(target=_rank, args=(rank, port, results)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [p.exitcode for p in processes] == [0, 0]
        together = dict(results)
    alone = {}
    _first_step(Ranks(), alone)
    assert torch.equal(together[0][0], together[1][0])
    assert torch.equal(together[0][1], together[1][1])
    assert not torch.equal(together[0][0], alone[0][0])


def test_resumed_weights_are_the_checkpoints():
    """Training goes on from the shipped EXL3 weights: the forward pass gives what transformers gives with them."""
    arguments = argparse.Namespace(seed=5, resume=CHECKPOINT)
    model = first_model(arguments)
    opened = Checkpoint(CHECKPOINT)
    oracle = Oracle(opened, json.loads((CHECKPOINT / "config.json").read_text())["text_config"])
    ids = list(range(300, 348))
    with torch.no_grad():
        ours = logits_at(model, torch.tensor([ids]), torch.arange(48), Precision())
    assert np.abs(ours.numpy() - oracle.logits(ids)).max() < 1e-3


def test_resuming_another_model_is_refused():
    changed = new_model(0)
    changed.model.language_model.layers = changed.model.language_model.layers[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "new_model", lambda seed: changed)
        with pytest.raises(ValueError, match="is another model"):
            first_model(argparse.Namespace(seed=0, resume=CHECKPOINT))
