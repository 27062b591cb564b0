"""A run as a picture: each ratio to the rival, with its spread and its aim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.results import Measured, Run
from benchmarks.harness.summary import Comparison, compare, competitors

_OURS, _WORSE, _AIM = "#1b6ca8", "#c0392b", "#7f8c8d"
_PANELS = (("CPU time", ("cpu_s",)), ("peak memory", ("traced_peak_bytes", "resident_peak_bytes")))


def draw(run: Run, path: Path) -> None:
    """Write the picture to `path`, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [
        (found, contestant)
        for found in run.benchmarks
        if "cpu_s" in found.shown
        for contestant in competitors(found)
    ]
    if not lines:
        return
    height = 1.4 + 0.24 * len(lines)
    figure, panels = pyplot.subplots(1, 2, figsize=(12, height), sharey=True)
    for axes, (title, metrics) in zip(panels, _PANELS, strict=True):
        _panel(axes, title, metrics, lines)
    panels[0].set_yticks(range(len(lines)), [_label(*line) for line in lines], fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle(f"tinsmith beside its rival, {run.machine.date}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _label(found: Measured, contestant: str) -> str:
    first, *_, rival = found.samples
    return f"{found.name}{contestant.removeprefix(first)} / {rival}"


def _panel(
    axes: Any, title: str, metrics: tuple[str, ...], lines: list[tuple[Measured, str]]
) -> None:
    for place, (found, contestant) in enumerate(lines):
        rival = list(found.samples)[-1]
        for metric, marker in zip(metrics, "os", strict=False):
            if metric in found.shown:
                _point(axes, place, marker, compare(found, contestant, rival, metric))
        for aim in found.aims:
            if aim.metric in metrics and aim.against == "rival":
                axes.plot(aim.at_most, place, marker="|", color=_AIM, markersize=10)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.grid(axis="x", linewidth=0.3)
    shapes = " (o Python, □ resident)" if len(metrics) > 1 else " (| aim)"
    axes.set_xlabel(f"{title}: ours / rival; left of 1 we need less{shapes}", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _point(axes: Any, place: int, marker: str, compared: Comparison) -> None:
    ratio = compared.ratio
    if ratio is None or ratio.middle <= 0:
        return
    axes.errorbar(
        ratio.middle,
        place,
        xerr=[[ratio.middle - ratio.low], [ratio.high - ratio.middle]],
        fmt=marker,
        markersize=4,
        fillstyle="full" if marker == "o" else "none",
        linewidth=1,
        color=_WORSE if ratio.middle > 1 else _OURS,
    )
