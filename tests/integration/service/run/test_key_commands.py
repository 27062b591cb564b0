"""`tinsmith key` on the database of a service, with and without the service running."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.postgres_server import new_database
from tinsmith.cli.main import main
from tinsmith.errors import AuthenticationError, LedgerUnavailableError
from tinsmith.service.api.keys import KeyRing
from tinsmith.service.ledger.records import ApiKey
from tinsmith.service.ledger.registry import open_ledger, open_ledger_beside
from tinsmith.service.ledger.sqlite import SqliteLedger

SERVER = """\
import asyncio, sys
from tinsmith.errors import AuthenticationError
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.service.api.keys import KeyRing

async def main():
    async with await open_ledger(sys.argv[1]) as ledger:
        ring = KeyRing(ledger, recheck_s=0)
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                print((await ring.holder(line.strip())).tenant.id, flush=True)
            except AuthenticationError:
                print("refused", flush=True)

asyncio.run(main())
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty ledger."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/ledger"
    return new_database()


@pytest.fixture
def server(database: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the ledger open as a server has, and says whose a key is."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, database],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.communicate()
    assert process.returncode == 0


def asked(server: subprocess.Popen[str], key: str) -> str:
    """Whose this key is, as the server sees it."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{key}\n")
    server.stdin.flush()
    return server.stdout.readline().strip()


def command(capsys: pytest.CaptureFixture[str], database: str, *words: str, status: int = 0) -> Any:
    """What a key command answers, as JSON."""
    assert main(["key", *words, "--database", database, "-f", "json"]) == status
    shown = capsys.readouterr()
    return json.loads(shown.out if status == 0 else shown.err)


def test_a_running_server_sees_created_and_revoked_keys(
    database: str, server: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(server, "tml-whatever") == "default"

    made = command(capsys, database, "create", "--tenant", "acme", "--name", "ci")

    assert asked(server, made["key"]) == "acme"
    assert asked(server, "tml-whatever") == "refused"
    [listed] = command(capsys, database, "list")["keys"]
    assert (listed["name"], listed["tenant"], listed["revoked_at"]) == ("ci", "acme", None)
    assert made["key"] not in json.dumps(listed)

    revoked = command(capsys, database, "revoke", listed["id"])

    assert revoked["revoked_at"] is not None
    assert asked(server, made["key"]) == "refused"
    assert asked(server, "tml-whatever") == "refused"


def test_a_key_is_an_operators_only_if_asked_for(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, database, "create", "--name", "plain")
    command(capsys, database, "create", "--name", "ops", "--operator")

    listed = command(capsys, database, "list")["keys"]

    assert {key["name"]: key["operator"] for key in listed} == {"plain": False, "ops": True}


def test_keys_can_be_made_before_the_first_start(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = command(capsys, database, "create")["key"]

    async def look_up() -> str:
        async with await open_ledger(database) as ledger:
            with pytest.raises(AuthenticationError):
                await KeyRing(ledger).holder(None)
            return (await KeyRing(ledger).holder(key)).tenant.id

    assert asyncio.run(look_up()) == "default"


def test_quotas_are_set_changed_and_removed(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = command(capsys, database, "create", "--tenant", "t", "--quota", "models=3")
    assert made["quotas"] == {"models": 3}

    changed = command(capsys, database, "quota", "t", "models=none", "tokens_per_hour=9")

    assert changed == {"tenant": "t", "quotas": {"tokens_per_hour": 9}}
    assert command(capsys, database, "quota", "t") == changed
    error = command(capsys, database, "quota", "tt", status=1)["error"]
    assert "unknown tenant 'tt'" in error["message"]


def test_concurrent_key_commands_lose_no_key(tmp_path: Path) -> None:
    """Also the first of them, which all find no ledger and want to make it."""
    words = [sys.executable, "-m", "tinsmith", "key", "create", "--data", str(tmp_path)]
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=120) for process in running]

    keys = {out.strip() for out, _ in ended}
    assert [process.returncode for process in running] == [0] * 4, ended
    assert len(keys) == 4

    async def count() -> int:
        async with await open_ledger(f"sqlite://{tmp_path}/ledger") as ledger:
            return await ledger.entries(ApiKey).count()

    assert asyncio.run(count()) == 4


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["create", "--tenant", "../x"], 2, "tenant name"),
        (["create", "--name", "\x1b[2J"], 2, "key name"),
        (["create", "--quota", "models"], 2, "NAME=N"),
        (["create", "--quota", "models=-1"], 2, "an integer"),
        (["create", "--quota", "modles=1"], 2, "unknown quota"),
        (["revoke", "tml-abc"], 2, "invalid key id"),
        (["revoke", "abcdef"], 1, "no key has"),
    ],
)
def test_invalid_key_commands_are_reported_and_change_nothing(
    words: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = f"sqlite://{tmp_path}/ledger"
    asyncio.run(made(database))

    error = command(capsys, database, *words, status=status)["error"]

    assert message in error["message"]
    assert command(capsys, database, "list") == {"keys": []}


async def made(database: str) -> None:
    """Make a ledger that is empty."""
    async with await open_ledger(database):
        pass


@pytest.mark.parametrize("words", [["list"], ["revoke", "abcdef"], ["quota", "t"]])
def test_a_folder_without_a_ledger_is_reported_and_left_untouched(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a slip in `--data`: a ledger that is made there would have no keys."""
    slip = tmp_path / "dta"

    error = command(capsys, f"sqlite://{slip}/ledger", *words, status=2)["error"]

    assert f"no ledger in {slip}" in error["message"]
    assert not slip.exists()


def test_a_data_folder_created_by_a_key_command_is_private(tmp_path: Path) -> None:
    assert main(["key", "create", "--data", str(tmp_path / "data")]) == 0

    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_key_commands_reject_an_in_memory_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    error = command(capsys, "memory:", "list", status=2)["error"]

    assert "ends with it" in error["message"]


def test_only_the_key_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "create", "--data", str(tmp_path)]) == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("tml-")
    assert shown.out.count("\n") == 1
    assert shown.out.strip() not in shown.err
    assert main(["key", "list", "--data", str(tmp_path)]) == 0
    assert shown.out.strip() not in capsys.readouterr().out


def test_a_key_command_does_not_take_the_lock_of_a_running_server(tmp_path: Path) -> None:
    async def work() -> None:
        address = f"sqlite://{tmp_path}/ledger"
        async with await open_ledger(address):
            async with await open_ledger_beside(address) as beside:
                assert await beside.entries(ApiKey).count() == 0
            with pytest.raises(LedgerUnavailableError, match="in use"):
                await SqliteLedger.open(tmp_path / "ledger")

    asyncio.run(work())
