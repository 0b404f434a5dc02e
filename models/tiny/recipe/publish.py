"""Put a finished run into models/tiny: checkpoint, held-out set, scores. Nothing is copied if a score is too low.

python -m models.tiny.recipe.publish --work build/tiny
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from .render import CHECKPOINT

LEAST = {"scores_source.json": 90.0, "scores_exl3.json": 88.0}
"""Percent exact that a checkpoint must reach to be shipped."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    for name, least in LEAST.items():
        exact = json.loads((arguments.work / name).read_text(encoding="utf-8"))["summary"]["exact_pct"]
        if exact < least:
            raise SystemExit(f"{name}: {exact} % exact, {least} % are required; nothing was copied")
    converted, heldout = arguments.work / "exl3", CHECKPOINT.parent / "heldout"
    for path in converted.iterdir():
        if path.name != "quantization_config.json":
            shutil.copyfile(path, CHECKPOINT / path.name)
    # The map of stored tensors is pretty-printed by the converter; compact JSON saves half of it.
    storage = json.loads((converted / "quantization_config.json").read_text(encoding="utf-8"))
    text = json.dumps(storage, separators=(",", ":")) + "\n"
    (CHECKPOINT / "quantization_config.json").write_text(text, encoding="utf-8")
    for name in ("heldout.jsonl", *LEAST):
        shutil.copyfile(arguments.work / name, heldout / name)
    print(f"published {converted} to {CHECKPOINT}")


if __name__ == "__main__":
    main()
