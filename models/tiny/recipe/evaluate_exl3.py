"""Score the held-out set with stock exllamav3 (Generator, greedy). Needs an NVIDIA GPU.

python -m models.tiny.recipe.evaluate_exl3 --checkpoint models/tiny/checkpoint --heldout heldout.jsonl --out scores.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from .config import EOS_IDS
from .evaluate_hf import MAX_NEW_TOKENS, decode, prompt_ids
from .heldout import read
from .report import write_scores


def main() -> None:
    from exllamav3 import Cache, Config, Generator, Job, Model, Tokenizer
    from exllamav3.generator.sampler import ArgmaxSampler

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    items = read(arguments.heldout)
    begin = time.monotonic()
    config = Config.from_directory(str(arguments.checkpoint))
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=65536, max_batch_size=arguments.streams)
    model.load(device="cuda:0")
    generator = Generator(model, cache, Tokenizer.from_config(config), max_batch_size=arguments.streams)
    tokens: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        ids = torch.tensor([prompt_ids(item)])
        generator.enqueue(
            Job(input_ids=ids, max_new_tokens=MAX_NEW_TOKENS, sampler=ArgmaxSampler(), stop_conditions=EOS_IDS, identifier=index)
        )
        tokens[index] = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["stage"] == "streaming" and "token_ids" in result:
                tokens[result["identifier"]] += result["token_ids"].flatten().tolist()
    outputs = [decode(tokens[index]) for index in range(len(items))]
    import exllamav3

    version = getattr(exllamav3, "__version__", "1.5.1")
    summary = write_scores(arguments.out, f"stock exllamav3 {version}, EXL3", items, outputs)
    print(json.dumps({"seconds": round(time.monotonic() - begin), **summary}))


if __name__ == "__main__":
    main()
