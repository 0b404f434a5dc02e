"""The parts of a glm5_next config.json that serving needs, read and checked once."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from services.common.errors import CheckpointError

ARCHITECTURE = "Glm5NextForConditionalGeneration"
LINEAR_ATTENTION = "linear_attention"
SPARSE_ATTENTION = "deepseek_sparse_attention"
# The shipped test model and GLM-5.3-Flash have the same architecture: the depth tells them apart.
FLASH_NUM_LAYERS = 45


@dataclass(frozen=True)
class TextConfig:
    """Dimensions of the text model. Field names follow config.json; widths in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_kpool: int
    linear_head_dim: int
    linear_num_heads: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float | None
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    rms_norm_eps: float
    swiglu_limit: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layers with routed experts, ascending; the position in it is the arena's layer index."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @property
    def default_served_name(self) -> Literal["glm-5.3-flash", "glm-5.3-tiny"]:
        """What SERVED_NAME defaults to."""
        return "glm-5.3-flash" if self.num_hidden_layers == FLASH_NUM_LAYERS else "glm-5.3-tiny"

    @classmethod
    def from_directory(cls, model_dir: pathlib.Path) -> Self:
        """Reads config.json.

        Raises:
            CheckpointError: the file or a field is missing, or a value is not supported; names it.
        """
        path = model_dir / "config.json"
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist: GLM53_MODEL_DIR must name a checkpoint directory") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        return cls.from_document(document, str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], where: str) -> Self:
        """The same from a parsed config.json; `where` names it in errors."""
        if not isinstance(document, dict) or not isinstance(document.get("text_config", {}), dict):
            raise CheckpointError(f"{where}: the document and its text_config must be JSON objects")
        if document.get("architectures") != [ARCHITECTURE]:
            raise CheckpointError(f"{where}: architectures is {document.get('architectures')}, need [{ARCHITECTURE!r}]")
        text: dict[str, Any] = document.get("text_config") or {}
        linear: dict[str, Any] = text.get("linear_attn_config") or {}
        if not linear or not isinstance(linear, dict):
            raise CheckpointError(f"{where}: text_config.linear_attn_config is missing or no JSON object")
        values = dict(text)
        values["linear_head_dim"] = linear.get("head_dim")
        values["linear_num_heads"] = linear.get("num_heads")
        values["linear_conv_kernel_dim"] = linear.get("short_conv_kernel_size")
        # Without the key the checkpoint's own runtime uses the softplus gate; transformers would assume -5.
        values["linear_lower_bound"] = linear.get("gate_lower_bound")
        eos = document.get("eos_token_id", text.get("eos_token_id"))
        values["eos_token_ids"] = [eos] if isinstance(eos, int) else eos
        _check_types(values, where)
        _fill_layer_types(values)
        wanted = {name: values.get(name) for name in cls.__dataclass_fields__}
        for name, value in wanted.items():
            if value is None and name != "linear_lower_bound":
                raise CheckpointError(f"{where}: text_config.{name} is missing")
        for name in ("layer_types", "mlp_layer_types", "eos_token_ids"):
            wanted[name] = tuple(wanted[name])  # type: ignore[arg-type]
        config = cls(**wanted)  # type: ignore[arg-type]
        _check(config, text, where)
        return config


def _is_whole(value: Any) -> bool:
    # JSON's true is no number, although Python counts it as one.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


# A field's annotation → what config.json has to have there, in words and as a check.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", _is_whole),
    "float": ("a number", _is_number),
    "float | None": ("a number", _is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("a list of names", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)),
    "tuple[int, ...]": ("a token id or a list of them", lambda value: isinstance(value, list) and all(map(_is_whole, value))),
}


def _check_types(values: dict[str, Any], where: str) -> None:
    """Refuses a field of another JSON type, before anything is computed with it."""
    for name, field in TextConfig.__dataclass_fields__.items():
        value = values.get(name)
        wanted, fits = _KINDS[str(field.type)]
        if value is not None and not fits(value):
            raise CheckpointError(f"{where}: text_config.{name} is {str(value)[:60]!r}, need {wanted}")


def _fill_layer_types(values: dict[str, Any]) -> None:
    """The schedules that a config.json may leave out."""
    depth = int(values.get("num_hidden_layers") or 0)
    if not values.get("layer_types"):
        values["layer_types"] = [SPARSE_ATTENTION if i % 4 == 3 else LINEAR_ATTENTION for i in range(depth)]
    if not values.get("mlp_layer_types"):
        dense = min(int(values.get("first_k_dense_replace", 3)), depth)
        values["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (depth - dense)


def _check(config: TextConfig, text: dict[str, Any], where: str) -> None:
    """Refuses what the cpu backend would compute wrongly."""
    depth = config.num_hidden_layers
    facts: tuple[tuple[bool, str], ...] = (
        (text.get("hidden_act", "silu") == "silu", "hidden_act must be silu"),
        (text.get("qk_rope_head_dim", 0) == 0, "qk_rope_head_dim must be 0"),
        (not text.get("attention_bias", False), "attention_bias must be false"),
        (text.get("n_group", 1) == 1 and text.get("topk_group", 1) == 1, "n_group and topk_group must be 1"),
        (text.get("scoring_func", "sigmoid") == "sigmoid", "scoring_func must be sigmoid"),
        (text.get("topk_method", "noaux_tc") == "noaux_tc", "topk_method must be noaux_tc"),
        (text.get("index_kpool_always_select_tail", True), "index_kpool_always_select_tail must be true"),
        (not text.get("tie_word_embeddings", False), "tie_word_embeddings must be false"),
        (len(config.layer_types) == depth, f"layer_types must have {depth} entries"),
        (set(config.layer_types) <= {LINEAR_ATTENTION, SPARSE_ATTENTION}, "layer_types has an unknown name"),
        (len(config.mlp_layer_types) == depth, f"mlp_layer_types must have {depth} entries"),
        (set(config.mlp_layer_types) <= {"dense", "sparse"}, "mlp_layer_types has an unknown name"),
        (bool(config.moe_layers), "there must be at least one layer with routed experts"),
        (config.hidden_size % 128 == 0 and config.moe_intermediate_size % 128 == 0, "hidden and expert widths must be multiples of 128"),
        (config.linear_head_dim % 64 == 0, "linear_attn_config.head_dim must be a multiple of 64"),
        (config.qk_nope_head_dim % 8 == 0 and config.v_head_dim % 8 == 0, "head widths must be multiples of 8"),
        (1 <= config.hc_mult <= 16, "hc_mult must be 1..16"),
        (config.n_routed_experts <= 1024, "n_routed_experts must be at most 1024"),
        (1 <= config.num_experts_per_tok <= config.n_routed_experts, "num_experts_per_tok must be 1..n_routed_experts"),
        (all(0 <= token < config.vocab_size for token in config.eos_token_ids), "eos_token_id must be below vocab_size"),
    )
    for holds, problem in facts:
        if not holds:
            raise CheckpointError(f"{where}: text_config.{problem}")
