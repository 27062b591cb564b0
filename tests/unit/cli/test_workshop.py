from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tinsmith.cli.main import main


def test_without_numpy_nothing_is_written_and_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # as if it were not installed

    status = main(["workshop", str(tmp_path / "workshop")])

    assert status == 1
    assert "pip install 'tinsmith[server]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
