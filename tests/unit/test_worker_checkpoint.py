"""What a damaged or unsupported checkpoint is refused with: always the tensor and the file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.common.errors import CheckpointError, ConfigError
from services.gpu_worker.backends import cpu, cpu_arena, cpu_weights
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.tokenizer_files import TokenizerFiles
from tests.support import random_checkpoint
from tests.support.random_checkpoint import TEXT, Recipe, Stored

SMALL = Recipe(num_layers=3, num_experts=8)
FILE = "model.safetensors"
EXPERT = TEXT + "layers.1.mlp.experts.5.up_proj"
Tensors = dict[str, Stored]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """The tensors of a small checkpoint."""
    return random_checkpoint.make_tensors(random_checkpoint.config_document(SMALL), SMALL)


@pytest.fixture
def write(tmp_path: pathlib.Path, tensors: Tensors) -> Callable[..., pathlib.Path]:
    """Writes the small checkpoint with some tensors changed; None leaves one out."""

    def make(changes: dict[str, Stored | None] | None = None) -> pathlib.Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(random_checkpoint.config_document(SMALL)))
        changed = {**tensors, **(changes or {})}
        random_checkpoint.save(directory / FILE, {name: stored for name, stored in changed.items() if stored is not None})
        return directory

    return make


def load_everything(directory: pathlib.Path) -> None:
    """What a worker reads."""
    checkpoint = Checkpoint(directory)
    for layer in checkpoint.config.moe_layers:
        shape = cpu_arena.expert_shape(checkpoint, layer)
        for expert in range(checkpoint.config.n_routed_experts):
            cpu_arena.fill_record(checkpoint, layer, expert, shape, np.empty(shape.record_bytes, np.uint8))
    cpu_weights.load(checkpoint, lambda _fraction, _what: None)


def test_the_whole_checkpoint_loads(write: Callable[..., pathlib.Path]) -> None:
    """The unchanged checkpoint is accepted."""
    load_everything(write())


NEEDED = [
    "lm_head.trellis",
    TEXT + "embed_tokens.weight",
    TEXT + "norm.weight",
    TEXT + "layers.0.input_layernorm.weight",
    TEXT + "layers.1.hc_ffn_base",
    TEXT + "layers.0.self_attn.conv1d.weight",
    TEXT + "layers.0.self_attn.dt_bias",
    TEXT + "layers.0.self_attn.f_b_proj.weight",
    TEXT + "layers.0.self_attn.qkv_proj.suh",
    TEXT + "layers.2.self_attn.kv_b_proj.weight",
    TEXT + "layers.2.self_attn.kv_a_layernorm.weight",
    TEXT + "layers.0.mlp.down_proj.svh",
    TEXT + "layers.1.mlp.gate.weight",
    TEXT + "layers.1.mlp.gate.e_score_correction_bias",
    TEXT + "layers.1.mlp.shared_experts.up_proj.trellis",
    EXPERT + ".trellis",
    EXPERT + ".svh",
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_tensor_is_named(write: Callable[..., pathlib.Path], name: str) -> None:
    """A checkpoint without a needed tensor is refused with the tensor's name and the directory."""
    directory = write({name: None})
    with pytest.raises(CheckpointError) as caught:
        load_everything(directory)
    assert name.rsplit(".", 1)[0] in caught.value.message
    assert "missing" in caught.value.message
    assert str(directory) in caught.value.message


@pytest.mark.parametrize("name", NEEDED)
def test_a_wrong_shape_is_named(write: Callable[..., pathlib.Path], tensors: Tensors, name: str) -> None:
    """A tensor with one row too many is refused with its name, its file and both shapes."""
    stored = tensors[name]
    grown = np.concatenate([stored.data, stored.data[:1]])
    directory = write({name: Stored(stored.dtype, grown)})
    with pytest.raises(CheckpointError) as caught:
        load_everything(directory)
    assert name in caught.value.message
    assert str(directory / FILE) in caught.value.message
    assert str(list(stored.data.shape)) in caught.value.message


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        (TEXT + "norm.weight", Stored("I32", np.zeros(256, np.int32))),
        (EXPERT + ".suh", Stored("F32", np.zeros(256, np.float32))),
        (EXPERT + ".trellis", Stored("F32", np.zeros((16, 8, 48), np.float32))),
    ],
)
def test_a_wrong_dtype_is_named(write: Callable[..., pathlib.Path], name: str, stored: Stored) -> None:
    """A tensor of another type is refused with its name, its file and the type that is needed."""
    directory = write({name: stored})
    with pytest.raises(CheckpointError, match="dtype") as caught:
        load_everything(directory)
    assert name in caught.value.message
    assert FILE in caught.value.message


@pytest.mark.parametrize(
    ("width", "told"), [(40, "2.5 bits.*half-integer"), (16 * 9, "9 bits"), (50, "3.125 bits"), (8, "0.5 bits.*half-integer")]
)
@pytest.mark.parametrize("key", [EXPERT, TEXT + "layers.0.self_attn.qkv_proj"])
def test_an_unsupported_rate_is_named(write: Callable[..., pathlib.Path], tensors: Tensors, key: str, width: int, told: str) -> None:
    """Half-integer and other unsupported bit rates are refused by name, for experts and other linears."""
    shape = (*tensors[key + ".trellis"].data.shape[:2], width)
    directory = write({key + ".trellis": Stored("I16", np.zeros(shape, np.int16))})
    with pytest.raises(CheckpointError, match=told) as caught:
        load_everything(directory)
    assert key + ".trellis" in caught.value.message
    assert FILE in caught.value.message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({EXPERT + ".mul1": Stored("I32", np.array(7, np.int32))}, "unsupported codebook"),
        ({EXPERT + ".mcg": Stored("I32", np.array(0xCBAC1FED, np.uint32).view(np.int32))}, "ambiguous"),
        ({EXPERT + ".mul1": None}, "codebook differ"),
        ({EXPERT + ".bias": Stored("F16", np.zeros(128, np.float16))}, "bias"),
    ],
)
def test_an_unsupported_codebook_is_named(write: Callable[..., pathlib.Path], changes: dict[str, Stored | None], told: str) -> None:
    """An unknown multiplier, two codebooks at once, mixed codebooks and biases are refused by name."""
    with pytest.raises(CheckpointError, match=told) as caught:
        load_everything(write(changes))
    assert "layers.1.mlp.experts" in caught.value.message


def test_unquantised_experts_are_refused(write: Callable[..., pathlib.Path]) -> None:
    """Routed experts must be in EXL3: nothing here evaluates dense ones."""
    changes: dict[str, Stored | None] = {f"{EXPERT}.{part}": None for part in ("trellis", "suh", "svh", "mul1")}
    changes[EXPERT + ".weight"] = Stored("F16", np.zeros((128, 256), np.float16))
    with pytest.raises(CheckpointError, match="quantised") as caught:
        load_everything(write(changes))
    assert EXPERT in caught.value.message


@pytest.mark.parametrize("cut", [1, 5000, 10**9])
def test_a_truncated_file_is_named(write: Callable[..., pathlib.Path], cut: int) -> None:
    """A file that lost its end, or all but a few bytes, is refused by name before anything is read from it."""
    directory = write()
    path = directory / FILE
    with path.open("r+b") as stream:
        stream.truncate(max(20, path.stat().st_size - cut))
    with pytest.raises(CheckpointError, match="truncated") as caught:
        Checkpoint(directory)
    assert str(path) in caught.value.message


def test_a_damaged_header_is_named(write: Callable[..., pathlib.Path]) -> None:
    """A header that is no JSON is refused with the file's name."""
    path = write() / FILE
    with path.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"\xff\xff\xff")
    with pytest.raises(CheckpointError, match="header") as caught:
        Checkpoint(path.parent)
    assert FILE in caught.value.message


def test_one_tensor_in_two_files_is_refused(write: Callable[..., pathlib.Path], tensors: Tensors) -> None:
    """The same tensor in two files is refused: nobody could say which one counts."""
    directory = write()
    random_checkpoint.save(directory / "other.safetensors", {TEXT + "norm.weight": tensors[TEXT + "norm.weight"]})
    with pytest.raises(CheckpointError, match=r"both .*model\.safetensors.*other\.safetensors"):
        Checkpoint(directory)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        TEXT + "norm.weight",
        TEXT + "embed_tokens.weight",
        TEXT + "layers.1.mlp.gate.weight",
        TEXT + "layers.0.mlp.down_proj.svh",
        EXPERT + ".suh",
        EXPERT + ".svh",
    ],
)
def test_values_that_are_no_finite_numbers_are_named(write: Callable[..., pathlib.Path], tensors: Tensors, name: str, value: float) -> None:
    """One NaN or infinity would turn every answer into noise: it is refused with tensor and file, for experts and other weights."""
    stored = tensors[name]
    data = stored.data.copy()
    if stored.dtype == "BF16":
        data.reshape(-1)[3] = np.array(value, np.float32).view(np.uint32) >> 16
    else:
        data.reshape(-1)[3] = value
    directory = write({name: Stored(stored.dtype, data)})
    with pytest.raises(CheckpointError, match="no finite numbers") as caught:
        load_everything(directory)
    assert name in caught.value.message
    assert FILE in caught.value.message


def test_the_hash_tells_contents_apart(write: Callable[..., pathlib.Path], tensors: Tensors) -> None:
    """Equal checkpoints have equal hashes; one changed weight of the same layout gives another."""
    first = Checkpoint(write()).hash
    assert Checkpoint(write()).hash == first
    changed = tensors[EXPERT + ".trellis"].data.copy()
    changed[3, 3, 3] ^= 1
    assert Checkpoint(write({EXPERT + ".trellis": Stored("I16", changed)})).hash != first


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_act", "gelu", "hidden_act"),
        ("n_group", 4, "n_group"),
        ("vocab_size", None, "vocab_size is missing"),
        ("linear_attn_config", None, "linear_attn_config"),
        ("qk_rope_head_dim", 64, "qk_rope_head_dim"),
        ("layer_types", ["linear_attention"], "layer_types"),
        ("hidden_size", 200, "multiples of 128"),
    ],
)
def test_an_unsupported_config_is_named(field: str, value: object, told: str) -> None:
    """A config that would be computed wrongly is refused with the field's name."""
    document = random_checkpoint.config_document(SMALL)
    document["text_config"][field] = value
    with pytest.raises(CheckpointError, match=told):
        TextConfig.from_document(document, "config.json")


@pytest.mark.parametrize(
    ("field", "value", "need"),
    [
        ("hidden_size", "256", "whole number"),
        ("hidden_size", 256.5, "whole number"),
        ("num_hidden_layers", True, "whole number"),
        ("rms_norm_eps", "1e-5", "a number"),
        ("swiglu_limit", float("nan"), "a number"),
        ("norm_topk_prob", 1, "true or false"),
        ("layer_types", "linear_attention", "list of names"),
        ("mlp_layer_types", ["dense", 3], "list of names"),
        ("eos_token_id", [1, "2"], "token id"),
        ("linear_attn_config", [128], "linear_attn_config"),
    ],
)
def test_a_config_field_of_another_type_is_named(field: str, value: object, need: str) -> None:
    """A field of another JSON type is refused by name, with what it needs."""
    document = random_checkpoint.config_document(SMALL)
    document.pop("eos_token_id", None)
    document["text_config"][field] = value
    with pytest.raises(CheckpointError, match=need) as caught:
        TextConfig.from_document(document, "config.json")
    assert field.removesuffix("_id") in caught.value.message


@pytest.mark.parametrize("document", [[], "x", {"text_config": [1]}])
def test_a_config_that_is_no_object_is_refused(document: Any) -> None:
    """JSON of another shape is refused in words."""
    with pytest.raises(CheckpointError, match="JSON objects"):
        TextConfig.from_document(document, "config.json")


BPE = {"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}


@pytest.mark.parametrize(
    "document",
    [
        [1],
        "text",
        {**BPE, "model": [1]},
        {**BPE, "model": {"type": "BPE"}},
        {**BPE, "model": {"type": "BPE", "vocab": {"a": "x"}}},
        {**BPE, "model": {"type": "BPE", "vocab": {"a": -1}}},
        {**BPE, "model": {"type": "BPE", "vocab": {"a": 10}}},
        {**BPE, "model": {"type": "BPE", "vocab": {"\u4e00": 1}}},
        {**BPE, "added_tokens": [{"content": "x"}]},
        {**BPE, "added_tokens": [{"id": "seven", "content": "x"}]},
        {**BPE, "added_tokens": [{"id": 10, "content": "x"}]},
    ],
)
def test_a_tokenizer_of_another_structure_is_named(tmp_path: pathlib.Path, document: object) -> None:
    """A tokenizer.json that does not look like one, or has ids beyond the vocabulary, is refused with the file's name."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        TokenTable.from_file(path, 10)
    assert str(path) in caught.value.message
    path.write_text(json.dumps(BPE))
    assert TokenTable.from_file(path, 10).pieces[0] == b"a"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("chat_template.jinja", "line one\n{% for x in %}", "line 2"),
        ("chat_template.jinja", "{{ x | no_such_filter }}", "no_such_filter"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'"),
        ("generation_config.json", '{"top_p": 2}', "top_p is '2'"),
        ("generation_config.json", '{"top_k": true}', "top_k is 'True'"),
    ],
)
def test_a_language_that_no_gateway_could_use_is_refused(tmp_path: pathlib.Path, file: str, text: str, told: str) -> None:
    """A template that does not compile and sampling defaults out of range are refused at start, with file and reason."""
    for source in (pathlib.Path("models/tiny/checkpoint")).iterdir():
        if source.suffix in (".json", ".jinja"):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    TokenizerFiles.from_directory(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=told) as caught:
        TokenizerFiles.from_directory(tmp_path)
    assert file in caught.value.message


def test_a_place_where_heat_cannot_be_saved_is_refused(tmp_path: pathlib.Path) -> None:
    """GLM53_HEAT_FILE must name a file in a folder that exists; the file itself may be missing."""
    cpu.check_heat_file("")
    cpu.check_heat_file(str(tmp_path / "heat"))
    for name in (tmp_path, tmp_path / "missing" / "heat"):
        with pytest.raises(ConfigError, match="GLM53_HEAT_FILE"):
            cpu.check_heat_file(str(name))
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "heat")
    with pytest.raises(ConfigError, match="in a folder that does not exist"):
        cpu.check_heat_file(str(tmp_path / "link"))


def test_a_file_that_holds_no_heat_is_refused_as_its_place(tmp_path: pathlib.Path) -> None:
    """It would be written over. Heat of either backend is ours, of whatever version and however damaged: it is ignored by who reads it."""
    place = tmp_path / "heat"
    for ours in (b"", b"G53heat1", b"G53heat1" + bytes(9), b"glm53 gpu heat 2" + bytes(80), b"glm53 gpu heat 1"):
        place.write_bytes(ours)
        cpu.check_heat_file(str(place))
    for other in (b"diary", b"G53heat", b"G53HEAT1" + bytes(80), b"\nG53heat1"):
        place.write_bytes(other)
        with pytest.raises(ConfigError, match=f"GLM53_HEAT_FILE=.* it has {len(other)} bytes that are no heat file of ours") as caught:
            cpu.check_heat_file(str(place))
        assert caught.value.param == "GLM53_HEAT_FILE"
        assert place.read_bytes() == other


def test_other_architectures_are_refused() -> None:
    """Another architecture is refused by name."""
    document = random_checkpoint.config_document(SMALL)
    document["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        TextConfig.from_document(document, "config.json")


def test_served_name_follows_the_checkpoint() -> None:
    """The shipped checkpoint and the real one have default names of their own."""
    document = random_checkpoint.config_document(Recipe())
    assert TextConfig.from_document(document, "").default_served_name == "glm-5.3-tiny"
    text = document["text_config"]
    text.update(num_hidden_layers=45, layer_types=None, mlp_layer_types=None, first_k_dense_replace=3)
    config = TextConfig.from_document(document, "")
    assert config.default_served_name == "glm-5.3-flash"
    assert len(config.moe_layers) == 42


def test_nvme_modes_are_refused_and_auto_is_fast() -> None:
    """The nvme modes are refused with the modes there are; auto takes fast and says why."""
    assert cpu.resolve_mode("auto")[0] == "fast"
    assert cpu.resolve_mode("exact")[0] == "exact"
    for mode in ("nvme", "nvme-exact"):
        with pytest.raises(ConfigError, match=f"GLM53_MODE={mode} is not in this version: use auto, fast or exact") as caught:
            cpu.resolve_mode(mode)
        assert caught.value.param == "GLM53_MODE"


@pytest.mark.parametrize("tokens", [1, 16, 63])
def test_a_context_that_holds_no_prompt_is_refused(tokens: int) -> None:
    """A context too small for a prompt and one token of answer would refuse every request: the setting is named at start instead."""
    with pytest.raises(ConfigError, match=f"GLM53_CONTEXT_TOKENS: .*{tokens} tokens hold no prompt") as caught:
        GpuWorkerSettings.load({"GLM53_CONTEXT_TOKENS": str(tokens)})
    assert caught.value.param == "GLM53_CONTEXT_TOKENS"
    assert [GpuWorkerSettings.load({"GLM53_CONTEXT_TOKENS": text}).context_tokens for text in ("0", "64")] == [0, 64]


def test_context_is_bounded_by_the_model() -> None:
    """The default context is what model and index selection allow; more is refused with the limit's name."""
    document = random_checkpoint.config_document(Recipe(text={"index_topk": 2048}))
    config = TextConfig.from_document(document, "")
    assert cpu.resolve_context(0, config) == 2048
    assert cpu.resolve_context(100, config) == 100
    with pytest.raises(ConfigError, match="index_topk 2048"):
        cpu.resolve_context(4096, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLM53_WORKER_ADDRESS", "nonsense"),
        ("GLM53_WORKER_ADDRESS", "unix:"),
        ("GLM53_WORKER_ADDRESS", "host:99999"),
        ("GLM53_MODE", "turbo"),
        ("GLM53_CHUNK_SIZE", "1"),
        ("GLM53_MAX_STREAMS", "0"),
        ("GLM53_CT_A", "-1"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: str) -> None:
    """A setting out of range is refused with its environment name."""
    with pytest.raises(ConfigError, match=name) as caught:
        GpuWorkerSettings.load({name: value})
    assert caught.value.param == name
