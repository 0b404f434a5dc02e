"""Write a scores file: machine, command, one row per item, summary."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

from .scoring import judge, summarize


def machine() -> dict[str, Any]:
    """What ran the scoring."""
    import torch

    info: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()}
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def _compact_rows(report: dict[str, Any]) -> str:
    """Indented JSON with one line per row."""
    head = json.dumps({k: v for k, v in report.items() if k != "rows"}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in report["rows"])
    return head[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n"


def write_scores(path: Path, engine: str, items: list[dict[str, Any]], outputs: list[str]) -> dict[str, Any]:
    """Write the scores of `outputs` and return their summary. Rows keep the text of wrong answers only."""
    rows = []
    judgements = [judge(item, text) for item, text in zip(items, outputs, strict=True)]
    for item, text, (exact, well_formed) in zip(items, outputs, judgements, strict=True):
        row: dict[str, Any] = {"id": item["id"], "exact": exact, "well_formed": well_formed}
        if not exact:
            row["output"] = text
        rows.append(row)
    summary = summarize(items, judgements)
    digest = hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()
    command = "python -m " + " ".join(["models.tiny.recipe." + Path(sys.argv[0]).stem, *sys.argv[1:]])
    report = {"engine": engine, "machine": machine(), "command": command, "items_sha256": digest, "summary": summary, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact_rows(report), encoding="utf-8")
    return summary
