from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tinsmith.cli.main import main


def test_a_demo_that_cannot_run_says_so_before_it_fetches_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    home = tmp_path / "home"

    status = main(["demo", "--data", str(home), "--out", str(tmp_path / "out")])

    assert status == 1
    assert "pip install 'tinsmith[demo]'" in capsys.readouterr().err
    assert not home.exists()


def test_a_demo_that_cannot_keep_its_results_says_so_before_it_fetches_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "home"

    status = main(["demo", "--data", str(home), "--out", str(tmp_path / "file" / "out")])

    assert status == 1
    told, hint = capsys.readouterr().err.splitlines()
    assert "file/out cannot be written to" in told
    assert "--out" in hint
    assert not home.exists()
