"""Score the held-out set with transformers (greedy, reference implementation of the architecture).

python -m models.tiny.recipe.evaluate_hf --checkpoint SOURCE --heldout heldout.jsonl --out scores.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from .config import EOS_IDS
from .heldout import read
from .render import THINK_END, encode, render_chat, tokenizer
from .report import write_scores

MAX_NEW_TOKENS = 400
SELECTED_KEYS = 2048


def prompt_ids(item: dict[str, Any]) -> list[int]:
    """The prompt as the gateway makes it; thinking off appends `</think>`."""
    text = render_chat(item["messages"], item.get("tools"), add_generation_prompt=True, **item.get("options", {}))
    return encode(text if item["thinking"] else text + THINK_END)


def decode(ids: list[int]) -> str:
    """Generated text up to the first end token, tags kept."""
    kept = []
    for token in ids:
        if token in EOS_IDS:
            break
        kept.append(token)
    return str(tokenizer().decode(kept, skip_special_tokens=False))


def load(checkpoint: Path, device: str, dtype: torch.dtype) -> Any:
    """The stock model, with KDA's reference evaluated in small chunks (same function, several times faster)."""
    import transformers.models.glm5_next.modeling_glm5_next as glm
    from transformers import Glm5NextForConditionalGeneration

    stock = glm.chunk_kimi_delta_attention
    if not hasattr(stock, "small_chunks"):

        def small(*args: Any, **kwargs: Any) -> Any:
            return stock(*args, **{"chunk_size": 16, **kwargs})

        small.small_chunks = True  # type: ignore[attr-defined]
        glm.chunk_kimi_delta_attention = small
    model = Glm5NextForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)
    model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            # Held-out conversations are shorter: the same keys are selected, with far smaller index tensors.
            module.index_topk = SELECTED_KEYS
    return model.to(device).eval()


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], device: str, batch_rows: int) -> list[str]:
    """Greedy answers; prompts are batched by length with padding on the left."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs = [""] * len(prompts)
    pad = EOS_IDS[0]
    for start in range(0, len(order), batch_rows):
        rows = order[start : start + batch_rows]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows], device=device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows], device=device)
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=EOS_IDS, pad_token_id=pad
        )
        for row, i in enumerate(rows):
            outputs[i] = decode(out[row, width:].tolist())
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-rows", type=int, default=320)
    parser.add_argument("--limit", type=int, default=0, help="score only every n-th item so that this many remain")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    items = read(arguments.heldout)
    if arguments.limit:
        items = items[:: max(1, len(items) // arguments.limit)]
    begin = time.monotonic()
    model = load(arguments.checkpoint, device, torch.float32)
    outputs = generate(model, [prompt_ids(item) for item in items], device, arguments.batch_rows)
    engine = f"transformers, weights bf16, arithmetic float32, {device}"
    summary = write_scores(arguments.out, engine, items, outputs)
    print(json.dumps({"seconds": round(time.monotonic() - begin), **summary}))


if __name__ == "__main__":
    main()
