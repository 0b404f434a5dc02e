"""Write calibration rows for the EXL3 conversion: training conversations, one per row.

    python -m models.tiny.recipe.calibration --out cal.safetensors [--rows 256]

The converter's bundled texts are far from what this model reads, so it is calibrated on its own chats.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from .batches import PAD
from .draw import Draw
from .mixture import GENERATORS, compose
from .render import encode_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=512)
    arguments = parser.parse_args()
    names = list(GENERATORS)
    ids = torch.full((arguments.rows, arguments.columns), PAD, dtype=torch.int64)
    lengths = torch.zeros(arguments.rows, dtype=torch.int64)
    for row in range(arguments.rows):
        conversation = compose(Draw(f"calibration-{row}"), names[row % len(names)])
        tokens = encode_training(conversation.messages, conversation.tools, **conversation.options)[0]
        tokens = tokens[: arguments.columns]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths[row] = len(tokens)
    save_file({"input_ids": ids, "lengths": lengths}, arguments.out)
    print(f"{arguments.rows} rows, {int(lengths.sum())} tokens")


if __name__ == "__main__":
    main()
