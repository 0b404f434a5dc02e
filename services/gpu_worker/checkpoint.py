"""A glm5_next checkpoint in EXL3 layout: which tensors it must have, and how they become weights.

Routed experts stay quantised: their parts are copied as they are into the arena's records. Every other linear is dequantised to fp32 (EXL3)
or widened (fp16, bf16) at load. A tensor that is missing, has a wrong shape or dtype, or uses a bit rate or codebook that we cannot decode
is refused by name and file.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.python import exl3
from services.common.errors import CheckpointError
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.safetensors_files import SafetensorsDirectory, check_finite

TEXT_PREFIX = "model.language_model."
MAX_K = 8
PROJECTIONS = ("gate", "up", "down")
CODEBOOK_3INST, CODEBOOK_MCG, CODEBOOK_MUL1 = 0, 1, 2
# The multiplier words that select a codebook; another value would decode to other weights.
_MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def _pad128(width: int) -> int:
    return (width + 127) // 128 * 128


@dataclass(frozen=True)
class Exl3Entry:
    """One EXL3 linear: its storage name, padded widths, bits per weight and codebook."""

    key: str
    inputs: int
    outputs: int
    k: int
    codebook: int


@dataclass(frozen=True)
class ExpertLayout:
    """What all routed experts of one layer share."""

    k: dict[str, int]  # by projection
    codebook: int


class Checkpoint:
    """An opened checkpoint directory.

    Args:
        model_dir: holds config.json, the tokenizer's files and ``*.safetensors``.

    Raises:
        CheckpointError: config.json or a file is missing or damaged.
    """

    def __init__(self, model_dir: pathlib.Path) -> None:
        self.path = model_dir
        self.config = TextConfig.from_directory(model_dir)
        self.files = SafetensorsDirectory(model_dir)
        config_bytes = (model_dir / "config.json").read_bytes()
        self.hash: bytes = hashlib.sha256(self.files.digest + config_bytes).digest()

    def tensor(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A float tensor of the text model (`name` without the text prefix) as fp32."""
        return self.files.float32(TEXT_PREFIX + name, shape)

    def linear(self, name: str, inputs: int, outputs: int, *, prefix: str = TEXT_PREFIX) -> NDArray[np.float32]:
        """The dense weight [inputs, outputs] of a linear, fp32, dequantised if it is stored in EXL3."""
        key = prefix + name
        if key + ".weight" in self.files:
            return np.ascontiguousarray(self.files.float32(key + ".weight", (outputs, inputs)).T)
        if key + ".trellis" not in self.files:
            raise CheckpointError(f"tensor {key}.weight (or {key}.trellis) is missing: no file in {self.path} has it")
        entry = self.exl3_entry(key, inputs, outputs)
        dense = exl3.dequantize(
            self.files.array(key + ".trellis").view(np.uint16),
            self._scales(key + ".suh"),
            self._scales(key + ".svh"),
            exl3.Codebook(entry.codebook),
        )
        return np.ascontiguousarray(dense[:inputs, :outputs])

    def _scales(self, name: str) -> NDArray[np.float16]:
        """A scale vector; CheckpointError when a value is not finite."""
        scales: NDArray[np.float16] = self.files.array(name)
        check_finite(self.files.entry(name), scales)
        return scales

    def exl3_entry(self, key: str, inputs: int, outputs: int, *, words: bool = True) -> Exl3Entry:
        """Checks one EXL3 linear's tensors.

        Args:
            words: False leaves the codebook's multiplier to `check_multiplier`: it is the one thing here that is read from the data.

        Raises:
            CheckpointError: names the tensor and its file.
        """
        padded_in, padded_out = _pad128(inputs), _pad128(outputs)
        trellis = self.files.entry(key + ".trellis")
        if len(trellis.shape) != 3 or trellis.dtype not in ("I16", "U16"):
            raise CheckpointError(
                f"tensor {key}.trellis in {trellis.file} has dtype {trellis.dtype} and shape {list(trellis.shape)}, need int16 with 3 dims"
            )
        width = trellis.shape[2]
        if width % 16 == 8:
            raise CheckpointError(
                f"tensor {key}.trellis in {trellis.file} has {width / 16:g} bits per weight: half-integer rates are not supported"
            )
        if width % 16 or not 1 <= width // 16 <= MAX_K:
            raise CheckpointError(
                f"tensor {key}.trellis in {trellis.file} has {width / 16:g} bits per weight, need a whole number 1..{MAX_K}"
            )
        self.files.expect(key + ".trellis", (padded_in // 16, padded_out // 16, width), ("I16", "U16"))
        for legacy in (".su", ".sv"):
            if key + legacy in self.files and key + legacy + "h" not in self.files:
                raise CheckpointError(
                    f"tensor {key}{legacy} in {self.files.entry(key + legacy).file}: packed sign vectors are not supported"
                )
        self.files.expect(key + ".suh", (padded_in,), ("F16",))
        self.files.expect(key + ".svh", (padded_out,), ("F16",))
        if key + ".bias" in self.files:
            raise CheckpointError(f"tensor {key}.bias in {self.files.entry(key + '.bias').file}: glm5_next linears have no bias")
        return Exl3Entry(key, padded_in, padded_out, width // 16, self._codebook(key, words=words))

    def _codebook(self, key: str, *, words: bool) -> int:
        present = [name for name in _MULTIPLIERS if f"{key}.{name}" in self.files]
        if len(present) == 2:
            raise CheckpointError(f"tensors {key}.mcg and {key}.mul1 are both present in {self.path}: the codebook is ambiguous")
        for name in present:
            tensor = f"{key}.{name}"
            entry = self.files.expect(tensor, self.files.entry(tensor).shape, ("I32", "U32"))
            if entry.num_bytes != 4:
                raise CheckpointError(
                    f"tensor {tensor} in {entry.file} has shape {list(entry.shape)}: a codebook's multiplier is one number"
                )
            if words:
                self.check_multiplier(key, self.files.raw)
            return CODEBOOK_MCG if name == "mcg" else CODEBOOK_MUL1
        return CODEBOOK_3INST

    def check_multiplier(self, key: str, read: Callable[[str], NDArray[np.uint8]]) -> None:
        """Refuses another multiplier than the two that can be decoded: the weights would be others.

        Args:
            read: the bytes of a tensor by its name.

        Raises:
            CheckpointError: names tensor, file and both values.
        """
        for name, wanted in _MULTIPLIERS.items():
            tensor = f"{key}.{name}"
            if tensor in self.files and (value := int.from_bytes(read(tensor).tobytes(), "little")) != wanted:
                raise CheckpointError(
                    f"tensor {tensor} in {self.files.entry(tensor).file} is {value:#010x}: unsupported codebook, need {wanted:#010x}"
                )

    def expert_key(self, layer: int, expert: int, projection: str) -> str:
        """Storage name of one projection of one routed expert."""
        return f"{TEXT_PREFIX}layers.{layer}.mlp.experts.{expert}.{projection}_proj"

    def expert_layout(self, layer: int, *, whole: bool = True) -> ExpertLayout:
        """Checks what the files' headers say about all routed experts of a layer, and returns what these share.

        Args:
            whole: False looks at the first one alone, for records that were checked when they were read.

        Raises:
            CheckpointError: an expert is missing or damaged, is not in EXL3, or differs from its neighbours.
        """
        hidden, inter = self.config.hidden_size, self.config.moe_intermediate_size
        widths = {"gate": (hidden, inter), "up": (hidden, inter), "down": (inter, hidden)}
        first: ExpertLayout | None = None
        for expert in range(self.config.n_routed_experts if whole else 1):
            entries = {}
            for projection in PROJECTIONS:
                key = self.expert_key(layer, expert, projection)
                if key + ".trellis" not in self.files and key + ".weight" in self.files:
                    raise CheckpointError(
                        f"tensor {key}.weight in {self.files.entry(key + '.weight').file}: routed experts must be quantised to EXL3"
                    )
                entries[projection] = self.exl3_entry(key, *widths[projection], words=False)
            codebooks = {entry.codebook for entry in entries.values()}
            layout = ExpertLayout({p: e.k for p, e in entries.items()}, entries["gate"].codebook)
            first = first or layout
            if len(codebooks) != 1 or layout != first:
                key = self.expert_key(layer, expert, "gate")
                raise CheckpointError(
                    f"tensor {key}.trellis in {self.files.entry(key + '.trellis').file}: bit rates or codebook differ within the layer"
                )
        assert first is not None
        return first

    def expert_tensors(self, layer: int, expert: int) -> Iterator[tuple[str, str]]:
        """(part of a record, storage name of its tensor): ``gate_trellis``, ``gate_suh``, ``gate_svh``, then up, then down."""
        for projection in PROJECTIONS:
            key = self.expert_key(layer, expert, projection)
            for part in ("trellis", "suh", "svh"):
                yield f"{projection}_{part}", f"{key}.{part}"
