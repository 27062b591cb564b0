"""A training call of several chunks, of which the service refuses one: its client goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service.served import Served, serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("chunks")) as service:
        yield service


@pytest.mark.parametrize("sdk", ["tinker", "tinsmith"])
@pytest.mark.parametrize("bad_chunk", [0, 1, 2])
def test_a_rejected_chunk_fails_its_call_but_no_later_one(
    served: Served, sdk: str, bad_chunk: int
) -> None:
    """The official client used to wait for ever if it was any chunk but the first."""
    module = "tests.e2e.service.refused_chunks"

    done = subprocess.run(
        [sys.executable, "-m", module, sdk, served.base_url, str(bad_chunk)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "data[0]" in said["refused"]
    if sdk == "tinsmith":
        landed = ", ".join(str(chunk) for chunk in range(3) if chunk != bad_chunk)
        assert f"of 3 chunks the server has {landed} " in said["notes"]
