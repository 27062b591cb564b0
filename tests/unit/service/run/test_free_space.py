"""A disk that fills up is told of before it is full."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.service.run.free_space import LEAST_BYTES, FreeSpace


def test_low_disk_space_is_reported_while_it_lasts_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = iter([LEAST_BYTES, LEAST_BYTES - 1, 12_000_000, LEAST_BYTES])
    space = FreeSpace(Path("/data"), lambda _: next(left))

    problems = []
    for _ in range(4):
        asyncio.run(space.look())
        problems.append(space.problem)

    assert problems[0] is None and problems[3] is None
    assert problems[2] is not None and "/data has 12 MB left" in problems[2]
    assert caplog.messages == [problems[1]]


def test_the_free_space_of_a_folder_is_that_of_its_disk(tmp_path: Path) -> None:
    space = FreeSpace(tmp_path)

    asyncio.run(space.look())

    assert space.free_bytes > 0
