"""Curves as text for the terminal, and the HTML report with curves and tables.

The report is one self-contained HTML file. It follows the reader's light or dark theme, and on a
narrow screen each table row becomes a block.

`draw` writes the curves to a PNG file. matplotlib comes with the extra `demo`. Without it the demo
only lacks the PNG file: the HTML report draws its own curves.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 16, 58
MAX_TICKS = 10

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
    """One value per step, from step 1."""

    title: str
    unit: str
    values: Sequence[float]


class ReportTable(NamedTuple):
    """A table of the report."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def bars(values: Sequence[float]) -> str:
    """A curve from 0 to its maximum as one line of block characters."""
    top = max(values, default=0.0) or 1.0
    steps = len(BARS) - 1
    return "".join(BARS[round(max(0.0, min(1.0, value / top)) * steps)] for value in values)


def page(title: str, lines: Sequence[str], parts: Sequence[Curve | ReportTable]) -> str:
    """The report as one HTML file."""
    summary = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    body = "".join(_chart(part) if isinstance(part, Curve) else _table(part) for part in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><ul>{summary}</ul>{body}</body></html>\n"
    )


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top` or just above, for an axis."""
    if not math.isfinite(top) or top <= 0.0:
        return [0.0, 1.0]
    rough = top / 6
    unit: float = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def _table(part: ReportTable) -> str:
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


def _chart(part: Curve) -> str:
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
    every = math.ceil(last / MAX_TICKS)
    for step in range(1, last + 1, every):
        x = x_of(step)
        drawn.append(f'<path class="axis" d="M{x:.1f},{floor}v5"/>')
        drawn.append(_text(x, floor + 24, "middle", str(step)))
    drawn.append(f'<path class="axis" d="M{LEFT},{TOP}V{floor}H{WIDTH - RIGHT}"/>')
    drawn.append(_text(LEFT + width / 2, HEIGHT - 6, "middle", "step"))
    middle = TOP + height / 2
    rotated = f'transform="rotate(-90 20 {middle:.1f})"'
    drawn.append(_text(20, middle, "middle", part.unit, rotated))
    points = [(x_of(step), y_of(value)) for step, value in enumerate(part.values, 1)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn.append(f'<polyline points="{line}"/>')
    drawn += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>step {step}: {value:.3f}</title></circle>'
        for step, ((x, y), value) in enumerate(zip(points, part.values, strict=True), 1)
    ]
    label = html.escape(f"{part.title}: {part.unit} by step")
    return (
        f"<h2>{html.escape(part.title)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str, more: str = "") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {at} text-anchor="{anchor}" {more}>{html.escape(text)}</text>'


_COLOURS = ("#c2410c", "#1b6ca8")
_INK, _GRID = "#333333", "#dddddd"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(title: str, curves: Sequence[Curve], path: Path) -> None:
    """Write one panel per curve, side by side, to `path`."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display

    figure = Figure(figsize=(5.5 * len(curves), 3.9))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    figure.suptitle(title, fontsize=13, color=_INK)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for number, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        _panel(axes, curve, _COLOURS[number % len(_COLOURS)])
    # Without metadata that would make two runs with the same seed differ.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _panel(axes: Any, curve: Curve, colour: str) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(curve.values) + 1)
    axes.plot(steps, curve.values, color=colour, linewidth=2, marker="o", markersize=4.5)
    axes.set_title(curve.title, fontsize=11, color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(curve.unit, color=_INK)
    axes.set_ylim(0, (max(curve.values, default=0.0) or 1.0) * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
