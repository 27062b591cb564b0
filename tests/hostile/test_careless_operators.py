"""Folders that hold something else already: it is told, or left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service.served import BASE_MODEL
from tinsmith.checkpoints.registry import open_store

WAIT_S = 90.0


def test_a_sweep_keeps_files_that_the_store_did_not_create(tmp_path: Path) -> None:
    """A folder called `staging` may have been there before the checkpoints were put beside it."""
    precious = tmp_path / "staging" / "website" / "index.html"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    store = open_store(str(tmp_path), work=tmp_path / "work")

    store.sweep()
    store.close()

    assert precious.read_text() == "precious"


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_in_place_of_the_data_folder_is_reported(tmp_path: Path, below: str) -> None:
    file = tmp_path / "data"
    file.write_text("precious")

    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tinsmith", "serve", "--engine", "fake", "--port", "0"),
            *("--model", BASE_MODEL, "--data", f"{file}{below}"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )

    assert ended.returncode != 0
    assert "cannot be the data folder" in ended.stderr
    assert "--data" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert file.read_text() == "precious"
