from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tinsmith.cli.main import main


def test_a_missing_package_is_reported_before_the_model_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    home = tmp_path / "home"

    status = main(["demo", "--data", str(home), "--out", str(tmp_path / "out")])

    assert status == 1
    assert "pip install 'tinsmith[demo]'" in capsys.readouterr().err
    assert not home.exists()


def test_an_unwritable_folder_is_reported_before_the_model_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "home"

    status = main(["demo", "--data", str(home), "--out", str(tmp_path / "file" / "out")])

    assert status == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "cannot write to" in error and "file/out" in error
    assert "--out" in hint
    assert not home.exists()
