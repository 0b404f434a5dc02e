"""A picture of a kernel benchmark: milliseconds of one expert by number of rows, one line a kernel. Plain SVG, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = (
    "#1b6ca8",
    "#2a9d5c",
    "#7b4fb5",
    "#c98a00",
    "#d1495b",
    "#8d6a4f",
    "#e07b39",
    "#5b6770",
    "#3aa6a6",
    "#a03a7b",
    "#777733",
    "#222222",
)
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 900, 480, 70, 50, 520, 370


def write(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """rows: those of bench.cpu_kernel; the smallest number of threads is drawn, on logarithmic axes."""
    timed = [r for r in rows if "rows" in r]
    threads = min(r["threads"] for r in timed)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in timed:
        if row["threads"] == threads:
            lines.setdefault(row["kernel"], []).append((row["rows"], row["p10_ms"]))
    times = [ms for points in lines.values() for _, ms in points]
    low, high = math.log2(min(times)) - 0.2, math.log2(max(times)) + 0.2
    most = max(m for points in lines.values() for m, _ in points)

    def place(m: int, ms: float) -> tuple[float, float]:
        across = math.log2(m) / max(1.0, math.log2(most))
        return LEFT + across * PLOT_WIDTH, TOP + (high - math.log2(ms)) / (high - low) * PLOT_HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}, {threads} thread{"s" if threads > 1 else ""}</text>',
    ]
    for m in sorted({m for points in lines.values() for m, _ in points}):
        x, _ = place(m, 2**low)
        parts.append(f'<line x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{TOP + PLOT_HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 4:.0f}" y="{TOP + PLOT_HEIGHT + 20}">{m}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        _, y = place(1, 2.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{LEFT + PLOT_WIDTH}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 50}" y="{y + 4:.0f}">{2.0**power:g} ms</text>')
    right = LEFT + PLOT_WIDTH + 20
    for i, (name, points) in enumerate(sorted(lines.items(), key=lambda item: item[1][-1][1], reverse=True)):
        colour, dash = COLOURS[i % len(COLOURS)], ' stroke-dasharray="6 4"' if name.startswith("stock") else ""
        path_points = " ".join("{:.1f},{:.1f}".format(*place(m, ms)) for m, ms in sorted(points))
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = TOP + 16 + 20 * i
        parts.append(f'<line x1="{LEFT + PLOT_WIDTH + 20}" y1="{y}" x2="{right + 30}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{right + 36}" y="{y + 4}">{escape(name)}</text>')
    parts.append(f'<text x="{LEFT + PLOT_WIDTH / 2 - 40:.0f}" y="{HEIGHT - 12}">tokens for the expert</text></svg>')
    path.write_text("\n".join(parts) + "\n")
