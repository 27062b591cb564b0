"""The size of a folder that others write to is told, whatever becomes of what is in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.files.base import reporting_growth

WAIT_S = 60.0


def test_progress_continues_when_a_folder_vanishes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip's temporary ones do."""
    (tmp_path / "model").write_bytes(b"1234")
    vanishing = tmp_path / "pip-unpack"
    vanishing.mkdir()
    scandir = os.scandir

    def scandir_too_late(path: Any = ".") -> Any:
        if Path(path) == vanishing and vanishing.exists():
            vanishing.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_too_late)
    told: list[int] = []
    is_told_on = threading.Event()

    def report(what: str, done: int, total: int | None) -> None:
        del what, total
        told.append(done)
        if len(told) > 2:
            is_told_on.set()

    with reporting_growth("downloading", tmp_path, None, report):
        assert is_told_on.wait(WAIT_S)

    assert not vanishing.exists()
    assert told == [0] + [4] * (len(told) - 1)
