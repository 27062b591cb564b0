from __future__ import annotations

import sys
import types

import pytest

from tinsmith.observe.terminal import Progress


def test_a_bar_shows_amount_rate_and_remaining_time() -> None:
    bar = Progress("Downloading", None, in_bytes=True)
    bar.begin(4 * 1024, done=1024)
    bar.add(1024)

    line = bar.line(2.0)

    assert line == f"Downloading [{'#' * 12}{'-' * 12}] 2.0 KB of 4.0 KB, 512 B/s, 0:04 left"


def test_an_unknown_total_has_no_bar() -> None:
    bar = Progress("Fetching runs", None)
    bar.add(3)

    assert bar.line(1.0) == "Fetching runs  3"


def test_a_slow_start_does_not_show_an_estimate_of_hours() -> None:
    bar = Progress("Converting", 260 * 1024**2, in_bytes=True)
    bar.add(12 * 1024)

    assert bar.line(10.0) == f"Converting [{'-' * 24}] 12.0 KB of 260.0 MB"


def test_uncountable_work_shows_only_its_name() -> None:
    assert Progress("SmolLM2: loading", None).line(3.0) == "SmolLM2: loading"


def test_nothing_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("Deleting", 3) as bar:
        bar.add(1)

    assert capsys.readouterr() == ("", "")


def test_a_notebook_cell_shows_the_bar_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the codes of terminals, which a cell would print."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))

    with Progress("Fetching", 3) as bar:
        pass

    shown = capsys.readouterr().err
    assert bar.line(0.0) in shown
    assert "\x1b" not in shown
    assert shown.endswith(f"\r{' ' * len(bar.line(0.0))}\r")


def test_a_bar_that_is_left_on_screen_shows_its_final_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))

    with Progress("samples", 3, is_left=True) as bar:
        bar.add(3)

    assert capsys.readouterr().err.endswith(f"samples [{'#' * 24}] 3 of 3\n")


def test_a_bar_never_shows_more_than_100_percent() -> None:
    bar = Progress("Downloading", 1024, in_bytes=True)
    bar.add(2048)

    assert bar.line(1.0).startswith(f"Downloading [{'#' * 24}] 1.0 KB of 1.0 KB")


@pytest.mark.parametrize("columns", [79, 70])
def test_a_bar_shrinks_on_a_narrow_terminal(columns: int) -> None:
    """The amounts were cut off on a terminal of 80 columns."""
    bar = Progress("SmolLM2-135M-Instruct: converting", 260 * 1024**2, in_bytes=True)
    bar.add(130 * 1024**2)

    line = bar.line(10.0, columns)

    assert len(line) <= columns
    assert "] 130.0 MB of 260.0 MB" in line
    assert ("0:10 left" in line) == (columns > 70)


def test_a_stream_captured_during_a_bar_writes_directly_after_it_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar of the user's own keeps the stream that it began with, and ends no line."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with Progress("Loading", 3):
        kept = sys.stderr

    kept.write("5 of 10")
    kept.flush()

    assert capsys.readouterr().err.endswith("5 of 10")
