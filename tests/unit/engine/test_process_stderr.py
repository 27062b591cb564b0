"""What a process wrote to stderr, as it is passed on and kept."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.engine.process.stderr import CHUNK_BYTES, MOST_LINE_CHARACTERS, Stderr

IN_A_PROGRAM_WITHOUT_STDERR = """
import asyncio, os, sys
from tinsmith.engine.process.stderr import Stderr

taken = open(sys.argv[1], "wb")
print(taken.fileno())

async def main():
    ours, theirs = os.pipe()
    os.write(theirs, b"of a library")
    os.close(theirs)
    stderr = Stderr(os.fdopen(ours, "rb"))
    print(await stderr.last_lines())
    await stderr.close()

asyncio.run(main())
"""


def test_without_stderr_nothing_is_written_to_a_file_with_descriptor_2(
    tmp_path: Path,
) -> None:
    file = tmp_path / "data"
    without = 'exec "$0" "$@" 2>&-'
    program = [sys.executable, "-c", IN_A_PROGRAM_WITHOUT_STDERR, str(file)]

    ran = subprocess.run(["sh", "-c", without, *program], capture_output=True, check=True)

    assert ran.stdout == b"2\nof a library\n"
    assert file.read_bytes() == b""


def test_endless_lines_and_binary_output_on_stderr_are_bounded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test() -> tuple[str, int]:
        ours, theirs = os.pipe()
        stderr = Stderr(os.fdopen(ours, "rb"))

        def write() -> None:
            with os.fdopen(theirs, "wb") as pipe:
                for _ in range(64):
                    pipe.write(b"\xff" * CHUNK_BYTES)

        await asyncio.to_thread(write)
        lines = await stderr.last_lines()
        await stderr.close()
        return lines, len(stderr._partial)

    lines, kept_bytes = asyncio.run(test())

    assert lines == "\N{REPLACEMENT CHARACTER}" * MOST_LINE_CHARACTERS
    assert kept_bytes == CHUNK_BYTES
    capfd.readouterr()
