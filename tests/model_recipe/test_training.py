import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402, N812

from models.tiny.recipe import kernels  # noqa: E402
from models.tiny.recipe.checkpoint_io import mtp_tensors, new_model  # noqa: E402
from models.tiny.recipe.config import LAYER_TYPES  # noqa: E402
from models.tiny.recipe.forward import Ops, Precision, logits_at  # noqa: E402

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
