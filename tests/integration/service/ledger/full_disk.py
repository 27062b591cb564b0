"""A process whose files may not grow beyond a limit: what happens to its ledger.

Run as `python full_disk.py FOLDER`. It appends until that fails, checks that the failure is told
and that all before it is there, then lifts the limit and goes on.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from pathlib import Path

from tests.integration.service.ledger.writer import submission
from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.ledger.sqlite import SqliteLedger

LIMIT_BYTES = 400_000


async def main(folder: Path) -> None:
    """Fill, fail, make room, go on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = await SqliteLedger.open(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    accepted, refused = [], []
    for start in range(1, 20_000, 50):
        numbers = range(start, start + 50)
        told = await asyncio.gather(
            *(ledger.append(submission(number)) for number in numbers), return_exceptions=True
        )
        for number, one in zip(numbers, told, strict=True):
            if isinstance(one, LedgerUnavailableError):
                assert "make room" in str(one), one
                refused.append(number)
            elif isinstance(one, BaseException):
                raise one
            else:
                accepted.append(number)
        if len(refused) > 60:
            break
    assert refused, "the limit was never reached"
    for number in accepted:
        assert (await ledger.command(_id(number))).seq_id == number

    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number in [*refused, *accepted[-20:]]:
        await ledger.append(submission(number))
    await ledger.close()

    async with await SqliteLedger.open(folder) as reopened:
        for number in accepted + refused:
            assert (await reopened.command(_id(number))).seq_id == number
        seen = await reopened.statistics()
        assert seen.pending == len(set(accepted + refused))
    sys.stdout.write(f"accepted {len(accepted)} refused {len(refused)}\n")


def _id(number: int) -> str:
    one = submission(number)
    return f"{one.queue_id}:{number}"


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
