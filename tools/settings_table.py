"""Writes docs/settings.md from the settings classes: `python -m tools.settings_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cli.settings import ServeSettings
from services.common.settings import ServiceSettings
from services.cpu_expert.settings import CpuExpertSettings
from services.gateway.settings import GatewaySettings
from services.gpu_worker.settings import GpuWorkerSettings

OUT = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
CLASSES: tuple[type[ServiceSettings], ...] = (GatewaySettings, GpuWorkerSettings, CpuExpertSettings, ServeSettings)
HEAD = """# Settings

Every setting is an environment variable; for the commonest there are flags too, which `.venv/bin/glm53 serve --help` lists. Each service
prints its settings with their sources at start. Written by `python -m tools.settings_table`.

| name | default | meaning | read by |
|---|---|---|---|
"""


def choices(annotation: Any) -> str:
    """What a setting may be, in words, where its values have names; else nothing."""
    return f"One of: {', '.join(map(str, get_args(annotation)))}." if get_origin(annotation) is Literal else ""


def table() -> str:
    """The whole document: one row per setting, the services that read it in the last column."""
    rows: dict[str, tuple[str, str, list[str]]] = {}
    for cls in CLASSES:
        for field in cls.model_fields.values():
            default = "" if field.default is None else str(int(field.default) if isinstance(field.default, bool) else field.default)
            meaning = " ".join(filter(None, (field.description, choices(field.annotation)))).replace("|", "\\|")
            rows.setdefault(str(field.validation_alias), (default, meaning, []))[2].append(cls.service)
    lines = [f"| `{name}` | {default or '-'} | {text} | {', '.join(who)} |" for name, (default, text, who) in sorted(rows.items())]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(table())
