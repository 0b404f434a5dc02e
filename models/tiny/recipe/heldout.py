"""Make the held-out set: values that training never uses, from a seed that is taken from the trained weights.

python -m models.tiny.recipe.heldout --weights SOURCE/model.safetensors --out models/tiny/heldout/heldout.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from .draw import Draw, is_reserved
from .mixture import GENERATORS, Conversation, compose

PER_KIND = 32
_OPEN_KINDS = frozenset({"phrase"})


def item_of(conversation: Conversation, used: list[tuple[str, str]], identity: str) -> dict[str, Any]:
    """A held-out item: everything up to the last answer, and that answer as the expectation."""
    answer = conversation.messages[-1]
    calls = [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in answer.get("tool_calls") or []]
    messages = [{k: v for k, v in m.items() if k != "no_think"} for m in conversation.messages[:-1]]
    item: dict[str, Any] = {
        "id": identity,
        "kind": conversation.kind,
        "phrasing": "new" if conversation.new_phrasing else "seen",
        "thinking": conversation.thinking,
        "messages": messages,
        "expected": {"tool_calls": calls} if calls else {"content": answer["content"]},
        "options": conversation.options,
        "values": sorted(set(used)),
    }
    if conversation.tools:
        item["tools"] = conversation.tools
    return item


def build(seed: str, per_kind: int = PER_KIND) -> list[dict[str, Any]]:
    """`per_kind` items for every generator of the mixture, deterministic in `seed`."""
    items = []
    for name in GENERATORS:
        for number in range(per_kind):
            draw = Draw(f"heldout-{seed}-{name}-{number}", held=True)
            items.append(item_of(compose(draw, name), draw.used, f"{name}-{number}"))
    return items


def check_no_overlap(items: list[dict[str, Any]], training_samples: int = 2000, seed: str = "overlap") -> int:
    """Raise ValueError if a held-out value is on the training side or occurs in sampled training conversations.

    Returns how many held-out values were checked.
    """
    values = {(kind, value) for item in items for kind, value in item["values"]}
    for kind, value in values:
        if kind not in _OPEN_KINDS and not is_reserved(kind, value):
            raise ValueError(f"{kind} {value!r} is in the held-out set but belongs to training")
    for number in range(training_samples):
        draw = Draw(f"{seed}-{number}")
        compose(draw)
        both = values.intersection(draw.used)
        if both:
            raise ValueError(f"training conversation {seed}-{number} uses held-out values {sorted(both)}")
    return len(values)


def weights_seed(path: Path) -> str:
    """The seed of the held-out set: the first 16 hex digits of the trained weights' SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def write(items: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for item in items:
            file.write(json.dumps(item, ensure_ascii=False) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="trained model.safetensors; its hash is the seed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=PER_KIND)
    arguments = parser.parse_args()
    seed = weights_seed(arguments.weights)
    items = build(seed, arguments.per_kind)
    checked = check_no_overlap(items)
    write(items, arguments.out)
    print(f"{len(items)} items, seed {seed}, {checked} values checked, none used in training")


if __name__ == "__main__":
    main()
