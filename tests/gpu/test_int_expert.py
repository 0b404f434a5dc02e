"""The GPU expert kernel gives the CPU kernel's bits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.python import cuda_expert
from kernels.python.exl3 import Codebook
from kernels.python.expert import Activation, ExpertPool, ExpertShape
from tests.kernels.cases import Case, all_cases, build
from tests.kernels.make_golden import GOLDEN_PATH, digest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not cuda_expert.is_built(), reason="libglm53_cuda.so is not built: no nvcc"),
]

from tests.gpu.int_expert_steps import DeviceLayer, Step, differing, expected_out, expected_rows, make_records, random_step  # noqa: E402

GOLDEN = {entry["name"]: entry["sha256"] for entry in json.loads(GOLDEN_PATH.read_text())["cases"]}
SUPPORTED = [case for case in all_cases() if case.codebook is Codebook.MUL1 and all(2 <= k <= 4 for k in case.bits)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ExpertPool]:
    with ExpertPool(threads=max(1, min(16, os.cpu_count() or 1))) as workers:
        yield workers


def one_expert_step(case_x: np.ndarray, weight: float = 1.0) -> Step:
    rows = len(case_x)
    return Step(case_x, np.zeros((rows, 1), np.int64), np.full((rows, 1), weight, np.float32), np.ones(1, np.bool_))


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_golden_cases(case: Case) -> None:
    """Every golden case that the kernel supports has the golden output, from VRAM and from mapped host memory."""
    shape, record, x = build(case)
    for mapped in (False, True):
        layer = DeviceLayer(shape, record[None], mapped=mapped)
        found = [layer.run(one_expert_step(x), all_here=all_here)[0] for all_here in (False, True)]
        layer.close()
        assert [digest(y) for y in found] == [GOLDEN[case.name]["y"]] * 2


def test_enough_golden_cases_are_supported() -> None:
    """The filter above leaves what the kernel promises: K = 2, 3, 4, mixed K, all activations, no gate, biases, 1 to 8 rows."""
    assert len(SUPPORTED) >= 40
    assert {k for case in SUPPORTED for k in case.bits} == {2, 3, 4}
    assert {case.activation for case in SUPPORTED} == set(Activation)
    assert {case.rows for case in SUPPORTED} == set(range(1, 9))
    assert any(case.gateless for case in SUPPORTED)
    assert any(len(set(case.bits)) == 3 for case in SUPPORTED)


SHAPES = [
    ("glm small", {"hidden": 512, "inter": 256, "bits": 3, "act_limit": 10.0}),
    ("k 2", {"hidden": 384, "inter": 128, "bits": 2}),
    ("k 4", {"hidden": 256, "inter": 384, "bits": 4, "has_bias": True}),
    ("k 2 3 4", {"hidden": 640, "inter": 128, "bits": (2, 3, 4), "activation": Activation.GELU}),
    ("k 4 3 2", {"hidden": 128, "inter": 640, "bits": (4, 3, 2), "activation": Activation.SWIGLU_OAI, "act_limit": 7.0}),
    ("gateless", {"hidden": 256, "inter": 256, "bits": 3, "activation": Activation.RELU2, "gateless": True}),
]
STEPS_PER_SHAPE = 180


@pytest.mark.parametrize("name", [name for name, _ in SHAPES])
def test_random_layer_steps(pool: ExpertPool, name: str) -> None:
    """Random routings of 1 to 8 rows, masked and invalid picks, all ways of launching: rows and sums have the CPU kernel's bits."""
    settings = dict(SHAPES)[name]
    shape = ExpertShape.create(settings.pop("hidden"), settings.pop("inter"), settings.pop("bits"), **settings)
    generator = np.random.default_rng(len(name))
    records = make_records(shape, 24, seed=len(name))
    layer = DeviceLayer(shape, records)
    for i in range(STEPS_PER_SHAPE):
        top_k = int(generator.integers(1, 17)) if i % 4 == 3 else 8
        step = random_step(generator, shape.hidden, 24, 1 + i % 8, top_k, absent=0.3 if i % 3 == 0 else 0.0, odd=0.2 if i % 5 == 0 else 0.0)
        narrow = i % 7 == 0 and not (step.selected > 1 << 30).any()
        index_type = cuda_expert.INDEX_I32 if narrow else cuda_expert.INDEX_I64
        # The buffers of a step are filled by kernels right before it, so after_kernel holds.
        found_y, found_out = layer.run(step, serial=i % 4 == 0, after_kernel=i % 4 == 1, all_here=i % 3 == 1, selected_type=index_type)
        y = expected_rows(pool, shape, records, step)
        active = step.active()
        assert differing(found_y[active], y[active]) == 0, i
        assert np.isnan(found_y[~active]).all(), i
        assert differing(found_out, expected_out(step, y)) == 0, i
    layer.close()


ONE_ROW_SHAPES = [
    ("k 2", {"hidden": 512, "inter": 512, "bits": 2, "act_limit": 10.0}),
    ("k 3", {"hidden": 1024, "inter": 1536, "bits": 3, "activation": Activation.GELU}),
    ("k 4 with biases", {"hidden": 512, "inter": 1024, "bits": 4, "has_bias": True, "activation": Activation.SWIGLU_OAI, "act_limit": 7.0}),
    ("k 3 wide", {"hidden": 2560, "inter": 512, "bits": 3}),
    ("mixed k", {"hidden": 512, "inter": 512, "bits": (3, 3, 4)}),
    ("gateless", {"hidden": 512, "inter": 512, "bits": 3, "activation": Activation.RELU2, "gateless": True}),
    ("odd size", {"hidden": 384, "inter": 640, "bits": 3}),
]
THREE_LAUNCHES_ALONE = {"mixed k", "gateless", "odd size"}
ONE_ROW_STEPS = 120


def check_launches(layer: DeviceLayer, one: bool) -> None:
    """Steps of one row have a launch of their own exactly where the shape and the device allow it."""
    major, _ = torch.cuda.get_device_capability()
    assert ("one launch for one row" in layer.experts.description) == (one and 9 <= major < 12), layer.experts.description


@pytest.mark.parametrize("mapped", [False, True], ids=["vram", "mapped"])
@pytest.mark.parametrize("name", [name for name, _ in ONE_ROW_SHAPES])
def test_one_row_has_the_same_bits_with_another_lane_and_without(pool: ExpertPool, name: str, mapped: bool) -> None:
    """Rows and sum of one launch and of three are the CPU kernel's: all, some or no picks here, invalid ones, an expert twice."""
    shape = ExpertShape.create(**dict(ONE_ROW_SHAPES)[name])
    records = make_records(shape, 16, seed=len(name))
    layer = DeviceLayer(shape, records, mapped=mapped)
    check_launches(layer, name not in THREE_LAUNCHES_ALONE)
    generator = np.random.default_rng(len(name) + mapped)
    computed = set()
    for i in range(ONE_ROW_STEPS // (4 if mapped else 1)):
        top_k = int(generator.integers(1, 17)) if i % 4 == 3 else 8
        absent = 1.0 if i % 16 == 7 else 0.4 if i % 2 else 0.0
        step = random_step(generator, shape.hidden, 16, 1, top_k, absent=absent, odd=0.2 if i % 5 == 0 else 0.0)
        if i % 11 == 5:
            step.selected[0, -1] = step.selected[0, 0]
        y, active = expected_rows(pool, shape, records, step), step.active()
        out = expected_out(step, y)
        computed.add(int(active.sum()))
        for all_here in (False, True, True):  # a step leaves the counters as the next one of either kind needs them
            found_y, found_out = layer.run(step, serial=i % 4 == 0, after_kernel=i % 4 == 1, all_here=all_here)
            assert differing(found_y[active], y[active]) == 0, (i, all_here)
            assert np.isnan(found_y[~active]).all(), (i, all_here)
            assert differing(found_out, out) == 0, (i, all_here)
    assert {0, 8} <= computed
    layer.close()


@pytest.mark.parametrize("mapped", [False, True], ids=["vram", "mapped"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_layer_steps_of_the_real_size(pool: ExpertPool, bits: int, mapped: bool) -> None:
    """Steps of GLM-5.3-Flash's expert, 4096 x 2048, 1 to 8 rows with 8 picks."""
    shape = ExpertShape.create(4096, 2048, bits, act_limit=10.0)
    records = make_records(shape, 16, seed=bits)
    layer = DeviceLayer(shape, records, mapped=mapped)
    check_launches(layer, True)
    generator = np.random.default_rng(bits)
    for rows in range(1, 9):
        step = random_step(generator, 4096, 16, rows, 8)
        y = expected_rows(pool, shape, records, step)
        for all_here in (False, True):
            found_y, found_out = layer.run(step, all_here=all_here)
            assert differing(found_y, y) == 0
            assert differing(found_out, expected_out(step, y)) == 0
    layer.close()


def test_a_row_that_is_not_finite_stays_alone(pool: ExpertPool) -> None:
    """A row with a NaN or an infinity is NaN throughout; its neighbours in the same run keep their bits."""
    shape = ExpertShape.create(256, 128, 3, act_limit=10.0)
    records = make_records(shape, 1, seed=5)
    layer = DeviceLayer(shape, records)
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    good, _ = layer.run(one_expert_step(x))
    for bad in (np.nan, np.inf, -np.inf):
        changed = x.copy()
        changed[2, 100] = bad
        found, _ = layer.run(one_expert_step(changed))
        assert np.isnan(found[2]).all()
        assert differing(found[[0, 1, 3]], good[[0, 1, 3]]) == 0
    layer.close()


def test_a_graph_reads_what_its_addresses_hold_then(pool: ExpertPool) -> None:
    """A captured step, replayed after new activations, picks and record addresses were written, computes the new step."""
    shape = ExpertShape.create(512, 256, 3, act_limit=10.0)
    records = make_records(shape, 12, seed=9)
    layer = DeviceLayer(shape, records)
    generator = np.random.default_rng(3)
    steps = [random_step(generator, 512, 12, 4, 8, absent=0.2) for _ in range(6)]
    steps = [Step(step.x.astype(np.float16), step.selected, step.weights.astype(np.float16), step.here) for step in steps]
    routing, (table, selected, weights) = layer.routing(steps[0])
    x = torch.from_numpy(steps[0].x).cuda()
    out = torch.zeros((4, 512), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        layer.experts.run(routing, x.data_ptr(), out=out.data_ptr(), stream=stream)
        layer.experts.run(routing, x.data_ptr(), out=out.data_ptr(), after_kernel=True, stream=stream)
    for step in steps:
        table.copy_(torch.where(torch.from_numpy(step.here).cuda(), layer.addresses, 0))
        selected.copy_(torch.from_numpy(step.selected))
        weights.copy_(torch.from_numpy(step.weights))
        x.copy_(torch.from_numpy(step.x))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        y = expected_rows(pool, shape, records, step)
        assert differing(out.cpu().numpy(), expected_out(step, y)) == 0
    del graph
    layer.close()


def test_steps_of_one_row_follow_each_other_in_a_graph(pool: ExpertPool) -> None:
    """One launch and three in turns, each prepared while the one before ends: each replay has the bits of the picks that it finds."""
    shape = ExpertShape.create(1024, 512, 3, act_limit=10.0)
    records = make_records(shape, 12, seed=10)
    layer = DeviceLayer(shape, records)
    check_launches(layer, True)
    generator = np.random.default_rng(5)
    steps = [random_step(generator, 1024, 12, 1, 8, absent=(0.0, 0.5, 1.0)[i % 3], odd=0.1) for i in range(30)]
    steps = [Step(step.x.astype(np.float16), step.selected, step.weights.astype(np.float16), step.here) for step in steps]
    routing, (table, selected, weights) = layer.routing(steps[0])
    x = torch.from_numpy(steps[0].x).cuda()
    order = (True, True, False, True, False, False, True)
    sums = torch.zeros((len(order), 1024), device="cuda")
    rows = torch.zeros((8, 1024), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        layer.experts.run(routing, x.data_ptr(), y=rows.data_ptr(), all_here=True, stream=stream)
        for out, all_here in zip(sums, order, strict=True):
            layer.experts.run(routing, x.data_ptr(), out=out.data_ptr(), after_kernel=True, all_here=all_here, stream=stream)
    for step in steps:
        table.copy_(torch.where(torch.from_numpy(step.here).cuda(), layer.addresses, 0))
        selected.copy_(torch.from_numpy(step.selected))
        weights.copy_(torch.from_numpy(step.weights))
        x.copy_(torch.from_numpy(step.x))
        sums.fill_(float("nan"))
        rows.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        y, active = expected_rows(pool, shape, records, step), step.active()
        expected = np.repeat(expected_out(step, y), len(order), axis=0)
        assert differing(sums.cpu().numpy(), expected) == 0
        assert differing(rows.cpu().numpy()[active], y[active]) == 0
    del graph
    layer.close()


def test_rows_of_two_lanes_combine_to_the_bits_of_one(pool: ExpertPool) -> None:
    """Half of the experts on the GPU, the other rows from host memory: the combined sum is that of a GPU that has all of them."""
    shape = ExpertShape.create(512, 256, 3, act_limit=10.0)
    records = make_records(shape, 16, seed=11)
    layer = DeviceLayer(shape, records)
    generator = np.random.default_rng(4)
    for rows in (1, 3, 8):
        step = random_step(generator, 512, 16, rows, 8)
        everything = Step(step.x, step.selected, step.weights, np.ones(16, np.bool_), step.shared)
        half = Step(step.x, step.selected, step.weights, generator.random(16) < 0.5, step.shared)
        _, expected = layer.run(everything)
        y, _ = layer.run(half)
        host_rows = expected_rows(pool, shape, records, Step(step.x, step.selected, step.weights, ~half.here))
        routing, keep = layer.routing(half)
        other = torch.from_numpy(host_rows).pin_memory()
        device_y, out = torch.from_numpy(y).cuda(), torch.full((rows, 512), float("nan"), device="cuda")
        shared = None if step.shared is None else torch.from_numpy(step.shared).cuda()
        cuda_expert.combine(
            routing,
            512,
            device_y.data_ptr(),
            out.data_ptr(),
            other_y=other.data_ptr(),
            shared=None if shared is None else shared.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )
        torch.cuda.synchronize()
        del keep
        assert differing(out.cpu().numpy(), expected) == 0
    layer.close()


def test_a_step_that_does_not_fit_is_refused() -> None:
    """The error names the argument; nothing is enqueued."""
    shape = ExpertShape.create(256, 128, 3)
    layer = DeviceLayer(shape, make_records(shape, 2, seed=1), max_picks=8)
    step = Step(np.zeros((8, 256), np.float16), np.zeros((8, 2), np.int64), np.ones((8, 2), np.float16), np.ones(2, np.bool_))
    with pytest.raises(ValueError, match="rows = 8 x top_k = 2: the handle has room for 8 picks"):
        layer.run(step)
    routing, keep = layer.routing(Step(step.x[:2], step.selected[:2], step.weights[:2], step.here))
    x = torch.zeros((2, 256), dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="y and out are both NULL"):
        layer.experts.run(routing, x.data_ptr())
    with pytest.raises(ValueError, match="x is not 16-byte aligned"):
        layer.experts.run(routing, x.data_ptr() + 2, out=x.data_ptr())
    del keep
    layer.close()
    with pytest.raises(ValueError, match="closed"):
        layer.experts.run(routing, x.data_ptr())
    with pytest.raises(ValueError, match="device 99 does not exist"):
        cuda_expert.CudaExperts(shape, 8, device=99)
