"""Read-only view of a directory of safetensors files.

Headers are parsed here and data is memory-mapped, so that a tensor's bytes are read once, straight into where they are needed, and so that
a damaged file is named before anything is computed from it.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.errors import CheckpointError

_DTYPES: dict[str, tuple[Any, int]] = {
    "F64": (np.float64, 8),
    "F32": (np.float32, 4),
    "F16": (np.float16, 2),
    "BF16": (np.uint16, 2),
    "I64": (np.int64, 8),
    "I32": (np.int32, 4),
    "U32": (np.uint32, 4),
    "I16": (np.int16, 2),
    "U16": (np.uint16, 2),
    "I8": (np.int8, 1),
    "U8": (np.uint8, 1),
    "BOOL": (np.bool_, 1),
}
_MAX_HEADER_BYTES = 256 * 1024 * 1024
# Files up to this size go into the hash whole, larger ones by this many samples.
_WHOLE_FILE_BYTES = 64 * 1024 * 1024
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of one file. `dtype` is safetensors' name, `start` an offset in the file in bytes."""

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsDirectory:
    """All tensors of all ``*.safetensors`` files of a directory, by name.

    Raises:
        CheckpointError: no file, a damaged header, a truncated file, or one tensor in two files.
    """

    def __init__(self, model_dir: pathlib.Path) -> None:
        self.path = model_dir
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{model_dir} has no .safetensors file")
        self._entries: dict[str, TensorEntry] = {}
        self._maps: dict[pathlib.Path, NDArray[np.uint8]] = {}
        digest = hashlib.sha256()
        for file in files:
            header, data_start = _read_header(file)
            self._add(file, header, data_start)
            self._maps[file] = np.memmap(file, np.uint8, "r")
            _hash_file(digest, file.name, self._maps[file], data_start)
        self.digest: bytes = digest.digest()

    def _add(self, file: pathlib.Path, header: dict[str, Any], data_start: int) -> None:
        size = file.stat().st_size
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            entry = _entry(name, fields, file, data_start)
            if name in self._entries:
                raise CheckpointError(f"tensor {name} is in both {self._entries[name].file} and {file}")
            if entry.start + entry.num_bytes > size:
                raise CheckpointError(
                    f"{file} is truncated: tensor {name} ends at byte {entry.start + entry.num_bytes}, the file has {size}"
                )
            self._entries[name] = entry

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """The tensor's place, or CheckpointError when no file has it."""
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"tensor {name} is missing: no file in {self.path} has it") from None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the file."""
        entry = self.entry(name)
        return self._maps[entry.file][entry.start : entry.start + entry.num_bytes]

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as stored (bf16 as its bits in uint16), a read-only view of the file where it is aligned."""
        entry = self.entry(name)
        kind, item = _DTYPES[entry.dtype]
        raw = self.raw(name)
        if entry.start % item:
            raw = raw.copy()
        array: NDArray[Any] = raw.view(kind).reshape(entry.shape)
        return array

    def float32(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A float tensor of any stored precision as a new fp32 array.

        Raises:
            CheckpointError: missing, of another shape, not a float tensor, or with a value that is no finite number.
        """
        entry = self.expect(name, shape, ("F32", "F16", "BF16"))
        stored = self.array(name)
        values = (stored.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "BF16" else stored.astype(np.float32)
        check_finite(entry, values)
        return values

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorEntry:
        """The entry, if it has this shape and one of these dtypes; CheckpointError otherwise."""
        entry = self.entry(name)
        if entry.shape != shape:
            raise CheckpointError(f"tensor {name} in {entry.file} has shape {list(entry.shape)}, need {list(shape)}")
        if entry.dtype not in dtypes:
            raise CheckpointError(f"tensor {name} in {entry.file} has dtype {entry.dtype}, need {' or '.join(dtypes)}")
        return entry


def check_finite(entry: TensorEntry, values: NDArray[Any]) -> None:
    """Refuses NaN and infinities: one of them turns every answer into noise without any other sign.

    Raises:
        CheckpointError: names tensor and file.
    """
    # The extremes of an array with a NaN are NaN; two numbers are cheaper than a mask as large as the tensor.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise CheckpointError(f"tensor {entry.name} in {entry.file} has values that are no finite numbers: the file is damaged")


def _read_header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size or length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is truncated or not a safetensors file: header of {length} bytes, file of {size}")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header: not an object")
    return header, 8 + length


def _entry(name: str, fields: Any, file: pathlib.Path, data_start: int) -> TensorEntry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        begin, end = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file} has a damaged header: tensor {name}") from None
    if dtype not in _DTYPES:
        raise CheckpointError(f"tensor {name} in {file} has dtype {dtype}, which is not supported")
    if begin < 0 or end - begin != int(np.prod(shape, dtype=np.int64)) * _DTYPES[dtype][1]:
        raise CheckpointError(f"{file} has a damaged header: tensor {name} of shape {list(shape)} has {end - begin} bytes")
    return TensorEntry(name, file, dtype, shape, data_start + begin, end - begin)


def _hash_file(digest: Any, name: str, data: NDArray[np.uint8], data_start: int) -> None:
    """Name, size, header, and the contents whole or by samples: two checkpoints of one layout must not look alike."""
    digest.update(f"{name}\0{data.size}\0".encode())
    if data.size <= _WHOLE_FILE_BYTES:
        digest.update(data.data)
        return
    digest.update(data[:data_start].data)
    for start in np.linspace(data_start, data.size - _SAMPLE_BYTES, _NUM_SAMPLES).astype(np.int64):
        digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
