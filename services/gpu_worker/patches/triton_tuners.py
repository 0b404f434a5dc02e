"""Triton's choices among kernel configurations, kept over restarts and equal wherever bits are compared.

An autotuned kernel times its configurations at the first call of each shape; which one wins may differ from start to start, and with it the
last bits. The choices live in the tuner's own cache, which is written to a file and read back before the first call. Files for known GPUs
are shipped; `python -m tools.triton_pin` makes them.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from services.common import own_file

log = logging.getLogger(__name__)

NAME = "triton_tuners"
KIND = "file of Triton's choices"
_BEGINNING = b'{\n "gpu": '  # of what `write` writes
_MAX_BYTES = 1 << 24  # of which a file is known to be ours: one of choices has some thousand
VERSION = 1
SHIPPED = Path(__file__).resolve().parents[1] / "triton_pins"
Choices = dict[str, dict[str, dict[str, Any]]]  # by kernel, then by the text of the tuner's key: a configuration's settings


class PinsError(ValueError):
    """A file of choices that cannot be used; says why."""


def find(tuner_class: type, modules: dict[str, ModuleType] | None = None, package: str = "exllamav3") -> dict[str, Any]:
    """The package's autotuned kernels that are imported, by dotted name.

    Args:
        tuner_class: triton.runtime.autotuner.Autotuner.
        modules: sys.modules, or a test's own.
    """
    found: dict[str, Any] = {}
    for name, module in sorted((sys.modules if modules is None else modules).items()):
        if name != package and not name.startswith(package + "."):
            continue
        for attribute, value in list(vars(module).items()):
            # A kernel with heuristics wraps its tuner.
            while value is not None and not isinstance(value, tuner_class):
                value = vars(value).get("fn") if hasattr(value, "__dict__") and not isinstance(value, type) else None
            if value is not None and not any(value is other for other in found.values()):
                found[f"{name}.{attribute}"] = value
    return found


def use_first_configurations(tuners: dict[str, Any]) -> int:
    """Every tuner keeps only its first configuration: nothing is timed. Returns how many tuners had more. For comparisons of bits."""
    several = [tuner for tuner in tuners.values() if len(tuner.configs) > 1]
    for tuner in several:
        tuner.configs = tuner.configs[:1]
    return len(several)


def shipped(gpu: str, folder: Path = SHIPPED) -> Path:
    """Where the choices for a GPU of that name are, if there are any: `NVIDIA H200` is nvidia-h200.json."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def save(path: Path, tuners: dict[str, Any], gpu: str) -> int:
    """Writes what the tuners have chosen so far; returns how many choices.

    Args:
        gpu: the GPU's name: choices of one are nothing to another.

    Raises:
        OSError: as `write`.
    """
    kernels = {
        name: {repr(key): config.all_kwargs() for key, config in tuner.cache.items() if _literal(key)} for name, tuner in tuners.items()
    }
    write(path, gpu, kernels)
    return sum(map(len, kernels.values()))


def write(path: Path, gpu: str, kernels: Choices) -> None:
    """Writes a file of choices, sorted. A reader never sees half of it.

    Raises:
        OSError: it cannot be written, or a file that is not of this kind lies there.
    """
    text = json.dumps({"version": VERSION, "gpu": gpu, "kernels": {n: c for n, c in kernels.items() if c}}, indent=1, sort_keys=True)
    own_file.replace(path, (text + "\n").encode(), is_choices, KIND)


def is_choices(file: BinaryIO) -> bool:
    """Whether a file is one that `write` wrote, in this version or another, whole or not; the choices themselves may be of no use."""
    text = file.read(_MAX_BYTES)
    if text.startswith(_BEGINNING) or own_file.is_blank(file):
        return True
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"version", "gpu", "kernels"} <= document.keys()


def check(name: str) -> None:
    """Refuses a file that choices would be written over.

    Args:
        name: GLM53_TRITON_PIN, empty for none.

    Raises:
        ConfigError: says what lies there.
    """
    if name:
        own_file.refuse_another("GLM53_TRITON_PIN", Path(name), is_choices, KIND)


def read(path: Path) -> tuple[str, Choices]:
    """The GPU's name and the choices of a file.

    Raises:
        PinsError: there is no such file, it is of another version, or anything in it is not as `write` writes it.
    """
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise PinsError(f"{path} has version {document['version']}, this build writes {VERSION}")
        gpu, kernels = document["gpu"], document["kernels"]
        entries = [(text, settings) for choices in kernels.values() for text, settings in choices.items()]
    except FileNotFoundError:
        raise PinsError(f"{path} does not exist yet") from None
    except PinsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PinsError(f"{path} cannot be read: {error}") from error
    for text, settings in entries:
        if not _is_literal(text) or not isinstance(settings, dict):
            raise PinsError(f"{path} cannot be read: {text!r} is no key, or has no settings")
    if not isinstance(gpu, str):
        raise PinsError(f"{path} cannot be read: it names no GPU")
    return gpu, kernels


def load(path: Path, tuners: dict[str, Any], gpu: str) -> tuple[int, str]:
    """Puts saved choices into the tuners' caches.

    Returns:
        how many were put there, and why none were, or "".
    """
    try:
        made_on, kernels = read(path)
    except PinsError as error:
        return 0, str(error)
    if made_on != gpu:
        return 0, f"{path} was made on {made_on}, this is {gpu}"
    pinned = 0
    for name, choices in kernels.items():
        tuner = tuners.get(name)
        if tuner is None:
            continue
        for text, wanted in choices.items():
            config = next((c for c in tuner.configs if c.all_kwargs() == wanted), None)
            if config is not None:
                tuner.cache[ast.literal_eval(text)] = config
                pinned += 1
    return pinned, "" if pinned else f"{path} holds no choice for the kernels of this build"


def _is_literal(text: str) -> bool:
    """True when the text is a key that can be put into a cache."""
    try:
        hash(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _literal(key: Any) -> bool:
    """True when the key can be read back from its text."""
    try:
        return bool(ast.literal_eval(repr(key)) == key)
    except (ValueError, SyntaxError):
        return False
