"""The curves as one PNG file, drawn with matplotlib where it is installed.

It comes with the extra `demo`, and is the only reason for it. The page with the curves needs
nothing, so that a demo without matplotlib lacks the picture alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.demo.curves import Curve

_COLOURS = ("#c2410c", "#1b6ca8")
_INK, _GRID = "#333333", "#dddddd"


def can_draw() -> bool:
    """Whether matplotlib is here."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(title: str, curves: Sequence[Curve], path: Path) -> None:
    """Write a panel for each curve, side by side, to `path`."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    figure = Figure(figsize=(5.5 * len(curves), 3.9))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    figure.suptitle(title, fontsize=13, color=_INK)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for number, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        _panel(axes, curve, _COLOURS[number % len(_COLOURS)])
    # Without what would make two runs of one seed differ.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _panel(axes: Any, curve: Curve, colour: str) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(curve.values) + 1)
    axes.plot(steps, curve.values, color=colour, linewidth=2, marker="o", markersize=4.5)
    axes.set_title(curve.title, fontsize=11, color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(curve.figure, color=_INK)
    axes.set_ylim(0, (max(curve.values, default=0.0) or 1.0) * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
