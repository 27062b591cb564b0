"""Curves: in the terminal as they grow, and as a page with pictures at the end."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN = 640, 240, 44


class Curve(NamedTuple):
    """A figure of each step."""

    title: str
    figure: str
    values: Sequence[float]


class Rows(NamedTuple):
    """A table: what was asked, and what was answered before and after."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def bars(values: Sequence[float], lowest: float = 0.0, highest: float | None = None) -> str:
    """A small curve as text."""
    top = max(values, default=1.0) if highest is None else highest
    spread = (top - lowest) or 1.0
    steps = len(BARS) - 1
    return "".join(
        BARS[round(max(0.0, min(1.0, (value - lowest) / spread)) * steps)] for value in values
    )


def page(title: str, lines: Sequence[str], parts: Sequence[Curve | Rows]) -> str:
    """The whole as one HTML file that needs nothing else."""
    body = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    body += "".join(_picture(part) if isinstance(part, Curve) else _table(part) for part in parts)
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.3rem .6rem;"
        "text-align:left;vertical-align:top}svg{max-width:100%;height:auto}"
        "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def _table(part: Rows) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in part.rows
    )
    return f"<h2>{html.escape(part.title)}</h2><table><tr>{head}</tr>{rows}</table>"


def _picture(part: Curve) -> str:
    top = max(part.values, default=0.0) or 1.0
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    last = max(1, len(part.values) - 1)
    points = " ".join(
        f"{MARGIN + width * step / last:.1f},{MARGIN + height * (1 - value / top):.1f}"
        for step, value in enumerate(part.values)
    )
    floor = HEIGHT - MARGIN
    axes = f"M{MARGIN},{MARGIN}V{floor}H{WIDTH - MARGIN}"
    words = [
        (MARGIN - 6, MARGIN + 5, "end", f"{top:.2f}"),
        (MARGIN - 6, floor + 5, "end", "0"),
        (WIDTH - MARGIN, floor + 20, "end", f"step {len(part.values)}"),
        (MARGIN, MARGIN - 14, "start", part.figure),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="13" fill="currentColor">'
        f"{html.escape(text)}</text>"
        for x, y, anchor, text in words
    )
    return (
        f"<h2>{html.escape(part.title)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(part.title)}">'
        f'<path d="{axes}" fill="none" stroke="currentColor"/>'
        f'<polyline points="{points}" fill="none" stroke="#c2410c" stroke-width="2"/>'
        f"{texts}</svg>"
    )
