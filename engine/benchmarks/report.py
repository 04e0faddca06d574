"""Benchmark results as a Markdown table and a small SVG plot of ratios on a logarithmic axis."""

from __future__ import annotations

import math
from html import escape
from typing import Any


def table(results: dict[str, Any]) -> str:
    facts = results["facts"]
    setting = (
        f"Measured {facts['when']} on {facts['cpu']}, Python {facts['python']}, mlx {facts['mlx']}, mlx-lm {facts['mlx-lm']}, "
        f"BLAS: {', '.join(f'{k} = {v}' for k, v in facts['blas'].items())}. Medians over interleaved rounds."
    )
    lines = [
        setting,
        "",
        "| item | what | mlxnb tok/s | mlx-lm tok/s | ratio (min to max) | aim | failed runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["compared"]:
        if r["ratio"] is None:
            lines.append(f"| {r['id']} | {r['title']} | - | - | no run succeeded | {r['aim']:.1f}x | {r['failures']} |")
            continue
        low, high = r["spread"]
        verdict = "" if r["ratio"] >= r["aim"] else " (missed)"
        lines.append(
            f"| {r['id']} | {r['title']} | {r['ours']:.1f} | {r['peer']:.1f} | **{r['ratio']:.2f}x** ({low:.2f} to {high:.2f}) "
            f"| {r['aim']:.1f}x{verdict} | {r['failures']} |"
        )
    lines += ["", "| item | what | result |", "|---|---|---|"]
    for r in results["absolute"]:
        lines.append(f"| {r['id']} | {r['title']} | {_absolute(r)} |")
    return "\n".join(lines) + "\n"


def _absolute(r: dict[str, Any]) -> str:
    if "median_ms" in r:
        return f"{r['median_ms']:.0f} ms (aim {r['aim_ms']} ms)"
    if "ms" in r:
        return ", ".join(f"B={b}: {ms:.2f} ms" for b, ms in r["ms"].items())
    return f"memory {r['memory_ratio']:.2f}x, step time {r['time_ratio']:.2f}x of the two kept apart (aim below 1.3x)"


def plot(results: dict[str, Any]) -> str:
    """Horizontal bars from 1x; a tick marks the aim."""
    rows = [r for r in results["compared"] if r["ratio"]]
    width, left, row_height = 720, 300, 26
    top = max([math.log2(max(r["ratio"], r["aim"])) for r in rows] + [1.0])
    low = min([math.log2(r["ratio"]) for r in rows] + [0.0])

    def x(ratio: float) -> float:
        return left + (math.log2(ratio) - low) / (top - low) * (width - left - 70)

    box = f'viewBox="0 0 {width} {len(rows) * row_height + 30}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="system-ui, sans-serif" font-size="12" fill="#777">']
    for i, r in enumerate(rows):
        y = i * row_height + 8
        start, end = sorted((x(1.0), x(r["ratio"])))
        colour = "#2f7d5b" if r["ratio"] >= r["aim"] else "#b4552d"
        parts += [
            f'<text x="{left - 10}" y="{y + 13}" text-anchor="end">{escape(r["title"])}</text>',
            f'<rect x="{start:.1f}" y="{y}" width="{max(end - start, 2):.1f}" height="18" fill="{colour}"/>',
            f'<line x1="{x(r["aim"]):.1f}" x2="{x(r["aim"]):.1f}" y1="{y - 2}" y2="{y + 20}" stroke="#777" stroke-dasharray="3 2"/>',
            f'<text x="{max(end, x(r["aim"])) + 6:.1f}" y="{y + 13}">{r["ratio"]:.2f}x</text>',
        ]
    parts.append(f'<text x="{left}" y="{len(rows) * row_height + 24}">ratio to mlx-lm, logarithmic; dashed: the aim</text></svg>')
    return "\n".join(parts) + "\n"
