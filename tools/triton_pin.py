"""Takes the choices of Triton's kernels that a GPU made into those that are shipped: `python -m tools.triton_pin FILE...`.

FILE is what a worker wrote to GLM53_TRITON_PIN, or a bench to triton_pins.json. A new choice takes the place of an old one of the same
kernel and key; other old ones stay. Exit 1, with nothing written, when a file cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.gpu_worker.patches import triton_tuners
from services.gpu_worker.patches.triton_tuners import Choices, PinsError


def merged(old: Choices, new: Choices) -> Choices:
    """All choices, new ones in front of old ones."""
    return {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}


def count(choices: Choices) -> int:
    """How many there are."""
    return sum(map(len, choices.values()))


def changed(old: Choices, new: Choices) -> int:
    """How many of the old choices have become others."""
    return sum(new.get(name, {}).get(key) != settings for name, of in old.items() for key, settings in of.items())


def take(path: Path, folder: Path) -> str:
    """Merges one file into the folder's for its GPU; a sentence about it.

    Raises:
        PinsError: one of both files cannot be used.
    """
    gpu, new = triton_tuners.read(path)
    target = triton_tuners.shipped(gpu, folder)
    old: Choices = {}
    if target.exists():
        made_on, old = triton_tuners.read(target)
        if made_on != gpu:
            raise PinsError(f"{target} was made on {made_on}, {path} on {gpu}")
    if not count(new):
        raise PinsError(f"{path} holds no choice")
    both = merged(old, new)
    triton_tuners.write(target, gpu, both)
    return f"{gpu}: {count(both)} choices, {count(both) - count(old)} of them new, {changed(old, both)} changed, in {target}"


def main(argv: list[str] | None = None) -> int:
    """Merges every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=triton_tuners.SHIPPED)
    args = parser.parse_args(argv)
    for path in args.files:
        try:
            print(take(path, args.folder))
        except PinsError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
