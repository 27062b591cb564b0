"""A process that appends until it is killed, and says so for each command once it is durable.

Run as `python writer.py FOLDER FIRST LAST_WORDS`: two lines of commands from number FIRST, with 64
appends under way. Every acknowledged one is a line of output, written at once. At the moment of the
acknowledgement LAST_WORDS it kills itself with signal 9: what it just said must be true.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import sys
from pathlib import Path

from tinsmith.service.ledger.records import (
    QueueId,
    RequestId,
    SessionId,
    Settlement,
    Submission,
    TenantId,
)
from tinsmith.service.ledger.sqlite import SqliteLedger

CALLERS = 64
LARGE_EVERY = 25


def payload(number: int) -> bytes:
    """What command `number` carries: now and then so much that it is a file."""
    return b"%d." % number * (40_000 if number % LARGE_EVERY == 0 else 10)


def submission(number: int) -> Submission:
    """Command `number`; odd ones are samples."""
    is_ordered = number % 2 == 0
    return Submission(
        queue_id=QueueId("model" if is_ordered else "sampler"),
        seq_id=number,
        kind="optim_step" if is_ordered else "asample",
        tenant_id=TenantId("t"),
        session_id=SessionId("s"),
        fingerprint=hashlib.sha256(payload(number)).digest(),
        payload=payload(number),
        is_ordered=is_ordered,
        clone=None if is_ordered else 0,
    )


async def main(folder: Path, first: int, last_words: int) -> None:
    """Append until the end."""
    ledger = await SqliteLedger.open(folder)
    numbers = itertools.count(first)
    said = itertools.count(1)

    def say(what: bytes) -> None:
        os.write(1, what)
        if next(said) == last_words:
            os.kill(os.getpid(), signal.SIGKILL)

    async def caller() -> None:
        for number in numbers:
            appended = await ledger.append(submission(number))
            say(b"appended %d\n" % number)
            if number % 3 == 0:
                request = RequestId(appended.request_id)
                done = Settlement(request_id=request, payload=payload(number))
                await ledger.settle([done])
                say(b"settled %d\n" % number)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
