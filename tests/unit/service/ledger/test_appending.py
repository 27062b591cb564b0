from __future__ import annotations

import asyncio

from tests.contract.ledgers import training
from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.ledger.appending import LARGEST_BATCH, Appending, Outcome
from tinsmith.service.ledger.payloads import inline
from tinsmith.service.ledger.records import Appended, Submission
from tinsmith.service.ledger.steps import Effects, Operation, Row, Values, run_steps


class EmptyLedger:
    """Answers every query as a ledger that holds nothing, and notes what is inserted."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.is_away = False
        self.poison: bytes | None = None

    async def write(self, operation: Operation[list[Outcome]]) -> list[Outcome]:
        await asyncio.sleep(0)
        if self.is_away:
            raise LedgerUnavailableError("away")
        return run_steps(operation(Effects()), self._ask)

    def _ask(self, name: str, values: Values) -> list[Row]:
        if name == "append":
            self.batches.append(len(values))
        if name == "keep_payload" and any(row[4] == self.poison for row in list(values)):  # type: ignore[index]
            raise ValueError("this row cannot be written")
        return [(0,)] if name in ("last_ordinal", "next_number") else []


async def append(appending: Appending, submission: Submission) -> Appended:
    return await appending.append(submission, inline(submission.payload), 1.0)


def test_concurrent_submissions_share_one_batch() -> None:
    async def tell() -> None:
        ledger = EmptyLedger()
        appending = Appending(ledger.write)

        await asyncio.gather(*(append(appending, training(n)) for n in range(LARGEST_BATCH + 5)))

        assert ledger.batches == [LARGEST_BATCH, 5]

    asyncio.run(tell())


def test_no_submission_joins_a_batch_that_failed_before_it_ran() -> None:
    async def tell() -> None:
        ledger = EmptyLedger()
        appending = Appending(ledger.write)
        ledger.is_away = True
        told = await asyncio.gather(
            *(append(appending, training(n)) for n in range(3)), return_exceptions=True
        )
        assert [type(one) for one in told] == [LedgerUnavailableError] * 3

        ledger.is_away = False

        async with asyncio.timeout(60):
            assert (await append(appending, training(4))).is_new

    asyncio.run(tell())


def test_a_row_that_cannot_be_written_does_not_fail_its_batch() -> None:
    async def tell() -> None:
        ledger = EmptyLedger()
        ledger.poison = b"poison"
        appending = Appending(ledger.write)
        bodies = [b"a", b"poison", b"b"]

        told = await asyncio.gather(
            *(append(appending, training(n, body)) for n, body in enumerate(bodies)),
            return_exceptions=True,
        )

        assert [type(one) for one in told] == [Appended, ValueError, Appended]

    asyncio.run(tell())


def test_equal_seq_ids_in_one_batch_are_deduplicated_or_rejected() -> None:
    """The same number twice in a batch is one command; numbers that are asked for follow on."""

    async def tell() -> None:
        appending = Appending(EmptyLedger().write)

        told = await asyncio.gather(
            append(appending, training(3)),
            append(appending, training(3)),
            append(appending, training(3, b"other")),
            append(appending, training(None)),
            append(appending, training(None)),
            return_exceptions=True,
        )

        assert [getattr(one, "seq_id", None) for one in told] == [3, 3, None, 4, 5]
        assert [getattr(one, "is_new", None) for one in told] == [True, False, None, True, True]

    asyncio.run(tell())
