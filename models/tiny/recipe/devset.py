"""Scores during training: teacher-forced exactness of the last turn on values that training does not use."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .batches import PAD
from .config import SPECIAL_IDS
from .draw import Draw
from .forward import Precision, logits_at
from .mixture import GENERATORS, compose
from .render import encode_training


class DevSet:
    """A small set in the manner of the held-out set, under other seeds."""

    def __init__(self, per_kind: int, max_len: int = 1024) -> None:
        self.rows: list[tuple[str, list[int], list[int]]] = []
        assistant = SPECIAL_IDS["<|assistant|>"]
        for name in GENERATORS:
            for number in range(per_kind):
                conversation = compose(Draw(f"dev-{name}-{number}", held=True), name)
                ids, learn = encode_training(conversation.messages, conversation.tools, **conversation.options)
                last = len(ids) - 1 - ids[::-1].index(assistant)
                targets = [i for i in range(last, len(ids)) if learn[i]]
                if len(ids) <= max_len:
                    self.rows.append((conversation.kind, ids, targets))
        self.rows.sort(key=lambda row: len(row[1]))

    @torch.no_grad()
    def score(self, model: Any, device: str, rows_per_batch: int = 64) -> dict[str, float]:
        """Percent of items whose every token of the last turn is the model's first choice, by kind and overall.

        This is a lower bound of greedy exactness: greedy text with other reasoning but the right answer fails here.
        """
        precision = Precision(torch.bfloat16 if device == "cuda" else torch.float32)
        by_kind: dict[str, list[bool]] = defaultdict(list)
        for start in range(0, len(self.rows), rows_per_batch):
            batch = self.rows[start : start + rows_per_batch]
            length = -(-max(len(ids) for _, ids, _ in batch) // 64) * 64
            ids = torch.full((len(batch), length), PAD, dtype=torch.int64)
            positions, labels, owners = [], [], []
            for row, (_, tokens, targets) in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                positions += [row * length + i - 1 for i in targets]
                labels += [tokens[i] for i in targets]
                owners += [row] * len(targets)
            logits = logits_at(model, ids.to(device), torch.tensor(positions, device=device), precision)
            wrong = logits.argmax(-1).cpu() != torch.tensor(labels)
            missed: Tensor = torch.zeros(len(batch)).index_add(0, torch.tensor(owners), wrong.float())
            for row, (kind, _, _) in enumerate(batch):
                by_kind[kind].append(bool(missed[row] == 0))
        result = {kind: round(100.0 * sum(v) / len(v), 1) for kind, v in sorted(by_kind.items())}
        every = [x for v in by_kind.values() for x in v]
        return {"all": round(100.0 * sum(every) / len(every), 1), **result}
