"""Curves as text in the terminal, and the page with curves, tables and settings.

The page is one HTML file that needs nothing else. It follows the reader's light or dark setting,
and on a narrow screen each row of a table is a block of its own.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 16, 58
MOST_TICKS = 10

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --panel: #f6f8fa; --curve: #b93a0a; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --ink: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --panel: #151b23; --curve: #ff9b6a; --good: #3fb950; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 1.5rem 1rem 3rem; background: var(--back);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; }
ul { padding-left: 1.2rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 13px; }
svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--soft); fill: none; }
svg polyline { stroke: var(--curve); stroke-width: 2.5; fill: none; }
svg circle { fill: var(--curve); }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: .95rem; }
th, td { border-bottom: 1px solid var(--line); padding: .45rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th { background: var(--panel); }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
@media (max-width: 40rem) {
  svg text { font-size: 20px; }
  thead { display: none; }
  tr { display: block; border: 1px solid var(--line); border-radius: .4rem; margin-bottom: .8rem; }
  td { display: block; border: 0; padding: .3rem .7rem; }
  td::before { content: attr(data-label); display: block; color: var(--soft); font-size: .8rem; }
}
""".strip()


class Curve(NamedTuple):
    """A figure of each step, from step 1 on."""

    title: str
    figure: str
    values: Sequence[float]


class Rows(NamedTuple):
    """A table, such as what was asked, and what was answered before and after."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def bars(values: Sequence[float], lowest: float = 0.0, highest: float | None = None) -> str:
    """A small curve as text."""
    top = max(values, default=1.0) if highest is None else highest
    spread = (top - lowest) or 1.0
    steps = len(BARS) - 1
    return "".join(
        BARS[round(max(0.0, min(1.0, (value - lowest) / spread)) * steps)] for value in values
    )


def page(title: str, lines: Sequence[str], parts: Sequence[Curve | Rows]) -> str:
    """The whole as one HTML file."""
    summary = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    body = "".join(_picture(part) if isinstance(part, Curve) else _table(part) for part in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><ul>{summary}</ul>{body}</body></html>\n"
    )


def ticks(top: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to `top` or just above it, for an axis."""
    if not math.isfinite(top) or top <= 0.0:
        return [0.0, 1.0]
    rough = top / most
    unit: float = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def _table(part: Rows) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.columns)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{html.escape(column)}">{html.escape(cell)}</td>'
            for column, cell in zip(part.columns, row, strict=True)
        )
        + "</tr>"
        for row in part.rows
    )
    caption = f"<caption>{html.escape(part.caption)}</caption>" if part.caption else ""
    return (
        f"<h2>{html.escape(part.title)}</h2><table>{caption}<thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _picture(part: Curve) -> str:
    marks = ticks(max(part.values, default=0.0))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    floor, last = HEIGHT - BOTTOM, max(2, len(part.values))

    def x_of(step: int) -> float:
        return LEFT + width * (step - 1) / (last - 1)

    def y_of(value: float) -> float:
        return TOP + height * (1 - value / marks[-1])

    drawn: list[str] = []
    for mark in marks:
        y = y_of(mark)
        drawn.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(_text(LEFT - 8, y + 5, "end", f"{mark:g}"))
    every = math.ceil(last / MOST_TICKS)
    for step in range(1, last + 1, every):
        x = x_of(step)
        drawn.append(f'<path class="axis" d="M{x:.1f},{floor}v5"/>')
        drawn.append(_text(x, floor + 24, "middle", str(step)))
    drawn.append(f'<path class="axis" d="M{LEFT},{TOP}V{floor}H{WIDTH - RIGHT}"/>')
    drawn.append(_text(LEFT + width / 2, HEIGHT - 6, "middle", "step"))
    middle = TOP + height / 2
    turned = f'transform="rotate(-90 20 {middle:.1f})"'
    drawn.append(_text(20, middle, "middle", part.figure, turned))
    points = [(x_of(step), y_of(value)) for step, value in enumerate(part.values, 1)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn.append(f'<polyline points="{line}"/>')
    drawn += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>step {step}: {value:.3f}</title></circle>'
        for step, ((x, y), value) in enumerate(zip(points, part.values, strict=True), 1)
    ]
    label = html.escape(f"{part.title}: {part.figure} by step")
    return (
        f"<h2>{html.escape(part.title)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str, more: str = "") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {at} text-anchor="{anchor}" {more}>{html.escape(text)}</text>'
