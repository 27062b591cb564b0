"""The short form of `soak.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.service import soak
from tests.e2e.service.served import BASE_MODEL, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
SHORT_S = 10.0


def test_many_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    """No memory, no threads, no sockets, no files, in the client and in the service."""
    with serving(tmp_path) as served:
        found = soak.run(served, BASE_MODEL, SHORT_S)

    assert found.sessions > 3
    assert found.growth() == []


def test_growth_of_memory_threads_and_files_is_detected() -> None:
    little = soak.Held(rss_bytes=1 << 20, threads=3, files=10)
    much = soak.Held(rss_bytes=1 << 30, threads=30, files=100)

    found = soak.Soaked(sessions=1, before={"client": little}, after={"client": much}).growth()

    assert len(found) == 3
