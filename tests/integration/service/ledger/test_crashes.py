"""A ledger whose process is killed: nothing acknowledged is lost, and nothing is there twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.service.ledger.writer import payload, submission
from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.ledger.records import Command, SessionId
from tinsmith.service.ledger.sqlite import SqliteLedger

WRITER = Path(__file__).with_name("writer.py")
ROOT = Path(__file__).parents[4]
ROUNDS = 8


@pytest.mark.skipif(sys.platform != "linux", reason="files are held open by O_PATH and /proc")
def test_an_acknowledged_large_payload_survives_a_power_cut(tmp_path: Path) -> None:
    """On a disk that has nothing but what was synced."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(WRITER.with_name("power_cut.py")), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stderr


def write_until_killed(folder: Path, first: int, lines: int, *, by_itself: bool) -> list[str]:
    """Start a writer that dies when it has said so many lines, and return all that it said."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    last_words = lines if by_itself else 0
    command = [sys.executable, str(WRITER), str(folder), str(first), str(last_words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        said: list[str] = []
        while len(said) < lines and (line := writer.stdout.readline()):
            said.append(line)
        if not by_itself:
            writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    assert all(line.endswith("\n") for line in said)
    return said


async def every_command(ledger: SqliteLedger) -> list[Command]:
    found: list[Command] = []
    while page := await ledger.commands_of(SessionId("s"), after=found[-1].ordinal if found else 0):
        found += page
    return found


def test_every_acknowledged_append_and_settlement_survives_kill_9(tmp_path: Path) -> None:
    """Thousands of appends, killed in the midst of them, several times over the same ledger."""
    chance = random.Random(5)
    appended: set[int] = set()
    settled: set[int] = set()
    for number in range(ROUNDS):
        first = number * 10**6
        lines = chance.randrange(200, 1500)
        for line in write_until_killed(tmp_path, first, lines, by_itself=number % 2 == 0):
            what, seq_id = line.split()
            (appended if what == "appended" else settled).add(int(seq_id))

    async def check() -> None:
        async with await SqliteLedger.open(tmp_path) as ledger:
            found = await every_command(ledger)
            numbers = [command.seq_id for command in found]
            assert len(numbers) == len(set(numbers)), "a command is there twice"
            assert appended <= set(numbers)
            assert settled <= {command.seq_id for command in found if command.is_settled}
            for command in found:
                wanted = payload(command.seq_id)
                if command.is_settled:
                    result = await ledger.result(command.request_id)
                    assert result is not None
                    assert result.payload == wanted
                if command.is_ordered or not command.is_settled:
                    assert await ledger.payload(command.request_id) == wanted
            again = await ledger.append(submission(max(appended)))
            assert not again.is_new
            await ledger.sweep()
            named = (await ledger.statistics()).payload_files
            files = [path for path in (tmp_path / "payloads").rglob("*") if path.is_file()]
            assert len(files) == named, "files that no row names are swept"
            assert len(appended) > 500

    asyncio.run(check())


def test_a_second_process_is_told_which_process_holds_the_ledger(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from tinsmith.service.ledger.sqlite import SqliteLedger\n"
        "async def main():\n"
        "    async with await SqliteLedger.open(pathlib.Path(sys.argv[1])):\n"
        "        print('open', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(LedgerUnavailableError, match=f"in use by process {owner.pid}"):
            asyncio.run(SqliteLedger.open(tmp_path))
        owner.communicate("")
    assert owner.returncode == 0

    async def reopen() -> None:
        await (await SqliteLedger.open(tmp_path)).close()

    asyncio.run(reopen())
