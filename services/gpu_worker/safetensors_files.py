"""Read-only view of a directory of safetensors files.

Headers are parsed here, so that a damaged file is named before anything is computed from it. Small tensors are views of the mapped files;
`TensorReader` reads the many bytes of routed experts straight to where they are needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

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
_PIECE_BYTES = 1 << 20
_HASHERS = 16


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
        self.paths = tuple(files)
        _check_index(model_dir, files)
        if not files:
            raise CheckpointError(f"{model_dir} has no .safetensors file")
        self._entries: dict[str, TensorEntry] = {}
        self._maps: dict[pathlib.Path, NDArray[np.uint8]] = {}
        starts = []
        for file in files:
            header, data_start = _read_header(file)
            self._add(file, header, data_start)
            starts.append(data_start)
            self._maps[file] = np.memmap(file, np.uint8, "r")
        # Each file's samples lie far apart: what takes time is one read after the other.
        with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
            self.digest: bytes = hashlib.sha256(b"".join(pool.map(_hash_file, files, starts))).digest()

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

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._entries.keys()

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


class TensorReader:
    """Reads tensors' bytes straight into other memory, from several threads at once: nothing of the files is mapped, so no page of theirs
    counts to this process.

    Args:
        files: whose tensors.
        keep_cached: False lets the system forget what was read, where files and their copy do not fit into memory together.

    Raises:
        CheckpointError: a file cannot be opened.
    """

    def __init__(self, files: SafetensorsDirectory, *, keep_cached: bool = True) -> None:
        self._files = files
        self._keep_cached = keep_cached
        self._descriptors: dict[pathlib.Path, int] = {}
        try:
            for path in files.paths:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{error.filename} cannot be opened: {error.strerror}") from None

    def into(self, name: str, out: NDArray[np.uint8]) -> None:
        """Fills `out`, contiguous uint8 [num_bytes of the tensor].

        Raises:
            CheckpointError: missing, the file cannot be read or has become shorter; names tensor and file.
        """
        entry = self._files.entry(name)
        if out.nbytes != entry.num_bytes:
            raise ValueError(f"tensor {name} has {entry.num_bytes} bytes, there is room for {out.nbytes}")
        descriptor, done, view = self._descriptors[entry.file], 0, out.data
        while done < entry.num_bytes:
            try:
                count = os.preadv(descriptor, [view[done:]], entry.start + done)
            except OSError as error:
                raise CheckpointError(f"tensor {name} in {entry.file} cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{entry.file} is truncated: tensor {name} ends at byte {entry.start + entry.num_bytes}")
            done += count
        if not self._keep_cached:
            os.posix_fadvise(descriptor, entry.start, entry.num_bytes, os.POSIX_FADV_DONTNEED)

    def read(self, name: str) -> NDArray[np.uint8]:
        """A small tensor's bytes. Raises as `into`."""
        out = np.empty(self._files.entry(name).num_bytes, np.uint8)
        self.into(name, out)
        return out

    def abandon(self) -> None:
        """Leaves the files open for good: a thread hangs in a read of one."""
        self._descriptors.clear()

    def close(self) -> None:
        """Closes the files; no thread may be reading."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_finite(entry: TensorEntry, values: NDArray[Any]) -> None:
    """Refuses NaN and infinities: one of them turns every answer into noise without any other sign.

    Raises:
        CheckpointError: names tensor and file.
    """
    # The extremes of an array with a NaN are NaN; two numbers are cheaper than a mask as large as the tensor.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise CheckpointError(f"tensor {entry.name} in {entry.file} has values that are no finite numbers: the file is damaged")


def _check_index(model_dir: pathlib.Path, files: list[pathlib.Path]) -> None:
    """Names a shard that the folder's index lists and that is not there. A folder needs no index."""
    index = model_dir / "model.safetensors.index.json"
    try:
        named = set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be used: {error!r}") from None
    for name in sorted(named - {file.name for file in files}):
        raise CheckpointError(f"{model_dir / name} is missing: {index} names it")


def _read_header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise CheckpointError(f"{file} is a pointer of Git LFS, not the file itself: fetch it (git lfs pull)")
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


def _hash_file(file: pathlib.Path, data_start: int) -> bytes:
    """Name, size, header, and the contents whole or by samples: two checkpoints of one layout must not look alike.

    Raises:
        CheckpointError: the file cannot be read.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name}\0{size}\0".encode())
    try:
        # Unbuffered: a sample is read as it is, without what lies around it.
        with file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            whole = size if size <= _WHOLE_FILE_BYTES else data_start
            for start in range(0, whole, _PIECE_BYTES):
                digest.update(os.pread(stream.fileno(), min(_PIECE_BYTES, whole - start), start))
            if whole < size:
                for start in np.linspace(data_start, size - _SAMPLE_BYTES, _NUM_SAMPLES).astype(np.int64):
                    digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, int(start)))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    return digest.digest()
