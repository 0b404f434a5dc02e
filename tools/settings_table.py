"""Writes docs/settings.md from the settings classes: `python -m tools.settings_table [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from cli.settings import ServeSettings
from services.common.settings import ServiceSettings
from services.cpu_expert.settings import CpuExpertSettings
from services.gateway.settings import GatewaySettings
from services.gpu_worker.settings import GpuWorkerSettings

OUT = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
CLASSES: tuple[type[ServiceSettings], ...] = (GatewaySettings, GpuWorkerSettings, CpuExpertSettings, ServeSettings)


def table() -> str:
    """The whole document: one row per setting, the services that read it in the last column."""
    rows: dict[str, tuple[str, str, list[str]]] = {}
    for cls in CLASSES:
        for field in cls.model_fields.values():
            default = "" if field.default is None else str(field.default)
            entry = rows.setdefault(str(field.validation_alias), (default, field.description or "", []))
            entry[2].append(cls.service)
    lines = [f"| `{name}` | {default or '-'} | {text} | {', '.join(who)} |" for name, (default, text, who) in sorted(rows.items())]
    head = (
        "# Settings\n\nEvery setting is an environment variable; `glm53 serve --help` shows the flags that set them. Each service prints its "
        "settings with their\nsources at start. Written by `python -m tools.settings_table`.\n\n| name | default | meaning | read by |\n|---|---|---|---|\n"
    )
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = table()
    if "--check" in sys.argv:
        sys.exit(0 if OUT.read_text() == text else f"{OUT.name} is out of date: run python -m tools.settings_table")
    OUT.write_text(text)
