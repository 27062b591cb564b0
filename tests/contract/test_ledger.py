"""What every ledger promises of commands; entries are in test_ledger_entries.py."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.contract.ledgers import (
    INLINE_BYTES,
    MODEL,
    SAMPLER,
    SESSION,
    TENANT,
    Place,
    a_session,
    ended,
    place,
    raised,
    sampling,
    story,
    training,
)
from tinsmith.errors import (
    CommandConflictError,
    CommandPassedError,
    LeaseLostError,
    LedgerUnavailableError,
    ResultGoneError,
    UnknownEntryError,
    ValidationError,
)
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import (
    LARGEST_NUMBER,
    Command,
    CommandState,
    QueueId,
    SessionEntry,
    SessionId,
    TenantId,
    UsageKey,
    Use,
    identity,
)
from tinsmith.service.ledger.scheduler_lease import Lease

__all__ = ["place"]  # a fixture, for pytest to find

LARGE = b"x" * (INLINE_BYTES * 3)
SHORT_S = 0.05
"""Long enough to see that nothing comes."""
LONG_S = 30.0
"""Never reached unless the ledger fails to wake us."""


def numbers(commands: list[Command]) -> list[int]:
    return [command.seq_id for command in commands]


@story
async def test_a_settled_command_records_its_start_time_and_batch(
    ledger: Ledger,
) -> None:
    appended = await ledger.append(training(1))
    ending = msgspec.structs.replace(ended(appended.request_id), started_at=12.5, batch="m:1")

    await ledger.settle([ending])

    command = await ledger.command(appended.request_id)
    assert (command.started_at, command.batch) == (12.5, "m:1")


# Appending


@story
async def test_an_appended_command_can_be_read_as_it_was_submitted(
    ledger: Ledger, place: Place
) -> None:
    appended = await ledger.append(training(3, b"body"))

    command = await ledger.command(appended.request_id)

    assert appended.is_new
    assert (command.queue_id, command.seq_id, command.kind) == (MODEL, 3, "forward_backward")
    assert (command.tenant_id, command.session_id) == (TENANT, SESSION)
    assert (command.state, command.payload_bytes) == (CommandState.PENDING, 4)
    assert command.created_at == place.clock.wall
    assert await ledger.payload(appended.request_id) == b"body"


@story
async def test_resubmitting_a_command_returns_the_first_request_id(ledger: Ledger) -> None:
    first = await ledger.append(training(1, b"body"))

    second = await ledger.append(training(1, b"body"))

    assert second.request_id == first.request_id
    assert (first.is_new, second.is_new) == (True, False)
    assert len(await ledger.claim("s", limit=10)) == 1


@pytest.mark.parametrize("payload", [b"small", LARGE])
def test_a_settled_command_submitted_again_is_not_run_again(place: Place, payload: bytes) -> None:
    async def tell() -> None:
        async with await place.open() as ledger:
            first = await ledger.append(training(1, payload))
            await ledger.claim("s", limit=1)
            await ledger.settle([ended(first.request_id)])

            second = await ledger.append(training(1, payload))

            assert (second.request_id, second.is_new) == (first.request_id, False)
            assert await ledger.claim("s", limit=10) == []

    asyncio.run(tell())


@story
async def test_a_different_body_under_the_same_seq_id_is_rejected(ledger: Ledger) -> None:
    await ledger.append(training(1, b"body"))

    for payload in (b"other", LARGE):
        message = await raised(ledger.append(training(1, payload)), CommandConflictError)
        assert "seq_id 1" in message
    assert await ledger.payload(f"{MODEL}:1") == b"body"


@story
async def test_racing_identical_submissions_become_one_command(ledger: Ledger) -> None:
    answers = await asyncio.gather(*(ledger.append(training(7)) for _ in range(50)))

    assert {answer.request_id for answer in answers} == {f"{MODEL}:7"}
    assert [answer.is_new for answer in answers].count(True) == 1
    assert len(await ledger.claim("s", limit=100)) == 1


@story
async def test_one_of_several_racing_different_bodies_is_accepted(ledger: Ledger) -> None:
    bodies = [b"body %d" % number for number in range(20)]

    answers = await asyncio.gather(
        *(ledger.append(training(7, body)) for body in bodies), return_exceptions=True
    )

    refused = [answer for answer in answers if isinstance(answer, CommandConflictError)]
    assert len(refused) == 19
    [accepted] = [i for i, a in enumerate(answers) if not isinstance(a, BaseException)]
    assert await ledger.payload(f"{MODEL}:7") == bodies[accepted]


@story
async def test_a_command_without_a_seq_id_gets_the_next_one(ledger: Ledger) -> None:
    await ledger.append(training(4))

    appended = [await ledger.append(training(None)) for _ in range(2)]

    assert [one.seq_id for one in appended] == [5, 6]
    assert all(one.is_new for one in appended)


@story
async def test_seq_ids_of_samples_use_all_64_bits(ledger: Ledger) -> None:
    appended = await ledger.append(sampling(LARGEST_NUMBER, clone=10**9))

    assert (await ledger.command(appended.request_id)).seq_id == LARGEST_NUMBER
    with pytest.raises(ValidationError):
        sampling(LARGEST_NUMBER + 1)


@pytest.mark.parametrize("queue_id", ["", "nul\0", "half \ud800", "x" * 501])
def test_a_queue_id_that_some_ledger_cannot_store_is_rejected(queue_id: str) -> None:
    with pytest.raises(ValidationError):
        training(1, queue_id=QueueId(queue_id))


@pytest.mark.parametrize("field", ["kind", "tenant_id", "session_id"])
def test_text_that_some_ledger_cannot_store_is_rejected(field: str) -> None:
    for wrong in ("nul\0", "half \ud800"):
        with pytest.raises(ValidationError):
            msgspec.structs.replace(training(1), **{field: wrong})


@pytest.mark.parametrize(
    "wanted",
    ["", ":", "m", "m:", ":1", "m:01", "m:-1", "m:1 ", "m:²", f"m:{2**63}", "m\0:1", "\ud800:1"],
)
def test_a_malformed_request_id_is_unknown(wanted: str) -> None:
    with pytest.raises(UnknownEntryError):
        identity(wanted)


@story
async def test_an_unknown_request_is_an_error(ledger: Ledger) -> None:
    for wanted in ("nonsense", f"{MODEL}:1", f"{MODEL}:{2**70}", ""):
        for look in (ledger.command, ledger.payload, ledger.result):
            await raised(look(wanted), UnknownEntryError)
        await raised(ledger.wait_settled(wanted, timeout_s=LONG_S), UnknownEntryError)


@story
async def test_a_different_kind_of_command_under_a_used_seq_id_is_rejected(ledger: Ledger) -> None:
    first = training(1)
    await ledger.append(first)

    other = msgspec.structs.replace(first, kind="optim_step")

    await raised(ledger.append(other), CommandConflictError)


# Claiming and settling


@story
async def test_commands_are_claimed_oldest_first_and_once(ledger: Ledger) -> None:
    for number in (2, 3, 1):
        await ledger.append(training(number))

    first = await ledger.claim("a", limit=2)
    rest = await ledger.claim("b", limit=5)

    assert (numbers(first), numbers(rest)) == ([2, 3], [1])
    assert {command.state for command in first + rest} == {CommandState.CLAIMED}
    assert [command.claimed_by for command in first + rest] == ["a", "a", "b"]
    assert await ledger.claim("a", limit=5) == []


@story
async def test_racing_claimers_never_get_the_same_command(ledger: Ledger) -> None:
    for number in range(30):
        await ledger.append(training(number))

    taken = await asyncio.gather(*(ledger.claim(f"s{i}", limit=3) for i in range(15)))

    assert sorted(numbers([one for some in taken for one in some])) == list(range(30))


@story
async def test_released_commands_are_claimed_again_in_their_original_order(ledger: Ledger) -> None:
    for number in range(4):
        await ledger.append(training(number))
    await ledger.claim("dead", limit=2)
    await ledger.claim("alive", limit=1)
    await ledger.settle([ended(f"{MODEL}:0")])

    released = await ledger.release_claims("dead")

    assert released == 1
    assert numbers(await ledger.claim("new", limit=5)) == [1, 3]


@story
async def test_the_first_settlement_wins(ledger: Ledger) -> None:
    request = (await ledger.append(training(1))).request_id
    key = UsageKey(tenant_id=TENANT, kind="training")

    first = await ledger.settle([ended(request, b"one", Use(key=key, amount=5))])
    second = await ledger.settle([ended(request, b"two", Use(key=key, amount=7), fail=True)])

    assert (first, second) == ([request], [])
    result = await ledger.result(request)
    assert result is not None
    assert (result.payload, result.is_failed) == (b"one", False)
    [row] = await ledger.usage(TENANT, since=0, before=1e12)
    assert row.amount == 5


@story
async def test_one_of_several_racing_settlements_wins(ledger: Ledger) -> None:
    request = (await ledger.append(sampling(1))).request_id

    told = await asyncio.gather(*(ledger.settle([ended(request, b"%d" % i)]) for i in range(20)))

    [winner] = [index for index, some in enumerate(told) if some]
    result = await ledger.result(request)
    assert result is not None
    assert result.payload == b"%d" % winner
    assert len(await ledger.completions(SAMPLER, 0, after=0)) == 1


@story
async def test_settling_an_unknown_command_is_ignored(ledger: Ledger) -> None:
    request = (await ledger.append(training(1))).request_id

    told = await ledger.settle([ended("nonsense"), ended(request), ended(f"{MODEL}:9", LARGE)])

    assert told == [request]


@story
async def test_a_result_can_be_read_until_it_is_acknowledged(ledger: Ledger) -> None:
    requests = [(await ledger.append(sampling(number))).request_id for number in range(2)]
    await ledger.settle([ended(requests[0], LARGE), ended(requests[1], b"no", fail=True)])

    for _again in range(2):
        result = await ledger.result(requests[0])
        assert result is not None
        assert result.payload == LARGE
    await ledger.acknowledge([requests[0], "nonsense", f"{SAMPLER}:99"])
    await ledger.acknowledge([requests[0]])

    await raised(ledger.result(requests[0]), ResultGoneError)
    kept = await ledger.result(requests[1])
    assert kept is not None
    assert (kept.payload, kept.is_failed) == (b"no", True)
    assert (await ledger.command(requests[0])).is_gone


@story
async def test_an_unsettled_command_has_no_result_to_acknowledge(ledger: Ledger) -> None:
    request = (await ledger.append(sampling(1))).request_id
    await ledger.acknowledge([request])
    assert await ledger.result(request) is None

    await ledger.settle([ended(request)])

    assert await ledger.result(request) is not None


@story
async def test_settling_deletes_the_payload_of_a_sample_but_not_of_a_training_call(
    ledger: Ledger,
) -> None:
    sample = (await ledger.append(sampling(1, LARGE))).request_id
    trained = (await ledger.append(training(1, LARGE))).request_id

    await ledger.settle([ended(sample), ended(trained)])

    await raised(ledger.payload(sample), UnknownEntryError)
    assert await ledger.payload(trained) == LARGE


# Waiting


@story
async def test_waiters_for_a_command_are_woken_when_it_is_settled(ledger: Ledger) -> None:
    request = (await ledger.append(training(1))).request_id
    waits = [asyncio.create_task(ledger.wait_settled(request, timeout_s=LONG_S)) for _ in range(3)]
    await asyncio.sleep(SHORT_S)

    await ledger.settle([ended(request, fail=True)])

    for command in await asyncio.gather(*waits):
        assert (command.is_settled, command.is_failed) == (True, True)
    again = await ledger.wait_settled(request, timeout_s=LONG_S)
    assert again.is_settled


@pytest.mark.parametrize("result", [b"small", LARGE], ids=["small", "large"])
def test_a_waiter_gets_the_command_and_result_that_the_ledger_holds(
    place: Place, result: bytes
) -> None:
    @story
    async def told(ledger: Ledger) -> None:
        requests = [(await ledger.append(each)).request_id for each in (training(1), sampling(1))]
        waits = [
            asyncio.create_task(ledger.wait_settled(one, timeout_s=LONG_S)) for one in requests
        ]
        await asyncio.sleep(SHORT_S)
        await ledger.claim("s", limit=1)
        ends = [ended(one, result) for one in requests]
        ends[0] = msgspec.structs.replace(ends[0], started_at=12.5, batch="b")
        await ledger.settle(ends)

        for wait, request in zip(waits, requests, strict=True):
            assert await wait == await ledger.command(request)
            first, second = await ledger.result(request), await ledger.result(request)
            assert first == second and first is not None and first.payload == result
        await raised(ledger.payload(requests[1]), UnknownEntryError)

    told(place)


@story
async def test_an_awaited_result_is_deleted_once_it_is_acknowledged(
    ledger: Ledger,
) -> None:
    request = (await ledger.append(training(1))).request_id
    wait = asyncio.create_task(ledger.wait_settled(request, timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)
    await ledger.settle([ended(request)])
    await wait

    await ledger.acknowledge([request])

    await raised(ledger.result(request), ResultGoneError)


@story
async def test_a_tenant_cannot_wait_for_a_command_of_another(ledger: Ledger) -> None:
    request = (await ledger.append(training(1))).request_id
    other = TenantId("somebody else")

    wait = ledger.wait_settled(request, timeout_s=LONG_S, tenant_id=other)
    await raised(wait, UnknownEntryError)
    mine = await ledger.wait_settled(request, timeout_s=0.0, tenant_id=TENANT)

    assert mine.request_id == request


@story
async def test_a_wait_ends_at_its_timeout(ledger: Ledger) -> None:
    request = (await ledger.append(sampling(1))).request_id

    command = await ledger.wait_settled(request, timeout_s=SHORT_S)

    assert not command.is_settled
    assert await ledger.wait_completions(SAMPLER, 0, after=0, timeout_s=SHORT_S) == []
    await ledger.claim("s", limit=1)
    assert not await ledger.wait_for_commands("s", timeout_s=SHORT_S)


@story
async def test_a_scheduler_is_woken_by_a_new_command(ledger: Ledger) -> None:
    wait = asyncio.create_task(ledger.wait_for_commands("s", timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)
    assert not wait.done()

    await ledger.append(training(1))

    assert await wait
    assert await ledger.wait_for_commands("s", timeout_s=LONG_S)


@story
async def test_a_scheduler_is_woken_by_released_claims(ledger: Ledger) -> None:
    await ledger.append(training(1))
    await ledger.claim("dead", limit=1)
    wait = asyncio.create_task(ledger.wait_for_commands("s", timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)

    await ledger.release_claims("dead")

    assert await wait


@story
async def test_no_command_is_missed_between_claiming_and_waiting(ledger: Ledger) -> None:
    """A scheduler that only claims and waits sees every command, however they interleave."""
    seen: list[int] = []

    async def schedule() -> None:
        seen.extend(numbers(await ledger.claim("s", limit=7)))
        while len(seen) < 200:
            assert await ledger.wait_for_commands("s", timeout_s=LONG_S)
            seen.extend(numbers(await ledger.claim("s", limit=7)))

    async def submit() -> None:
        for number in range(200):
            await ledger.append(training(number))

    await asyncio.gather(schedule(), submit())
    assert seen == list(range(200))


# Feeds


@story
async def test_completions_are_listed_in_settlement_order(ledger: Ledger) -> None:
    requests = [(await ledger.append(sampling(number))).request_id for number in range(3)]
    other = (await ledger.append(sampling(10**9, clone=1))).request_id
    await ledger.settle([ended(requests[2]), ended(other)])
    await ledger.settle([ended(requests[0], b"12345", fail=True)])

    told = await ledger.completions(SAMPLER, 0, after=0)

    assert [one.request_id for one in told] == [requests[2], requests[0]]
    assert [one.is_failed for one in told] == [False, True]
    assert told[1].result_bytes == 5
    assert told[0].cursor < told[1].cursor
    assert await ledger.completions(SAMPLER, 0, after=told[0].cursor) == told[1:]
    assert await ledger.completions(SAMPLER, 0, after=0, limit=1) == told[:1]
    assert await ledger.completions(SAMPLER, 0, after=told[1].cursor) == []
    assert [c.request_id for c in await ledger.completions(SAMPLER, 1, after=0)] == [other]


@story
async def test_a_completion_is_still_listed_after_its_result_was_acknowledged(
    ledger: Ledger,
) -> None:
    request = (await ledger.append(sampling(1))).request_id
    await ledger.settle([ended(request)])
    await ledger.acknowledge([request])

    told = await ledger.completions(SAMPLER, 0, after=0)

    assert [one.request_id for one in told] == [request]


@story
async def test_a_feed_poll_is_woken_only_by_completions_of_its_own_feed(ledger: Ledger) -> None:
    mine = (await ledger.append(sampling(1))).request_id
    other = (await ledger.append(sampling(10**9, clone=1))).request_id
    poll = asyncio.create_task(ledger.wait_completions(SAMPLER, 0, after=0, timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)
    await ledger.settle([ended(other)])
    await asyncio.sleep(SHORT_S)
    assert not poll.done()

    await ledger.settle([ended(mine)])

    assert [one.request_id for one in await poll] == [mine]


# Cancelling


@story
async def test_a_waiting_claim_returns_the_next_commands_that_arrive(ledger: Ledger) -> None:
    """What was there before, what comes, and nothing when the time is up."""
    await ledger.append(training(1))

    before = await ledger.wait_claim("s", limit=5, timeout_s=LONG_S)
    waiting = asyncio.create_task(ledger.wait_claim("s", limit=5, timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)
    assert not waiting.done()
    appended = (await ledger.append(training(2))).request_id
    [came] = await waiting

    assert numbers(before) == [1]
    assert came == await ledger.command(appended)
    assert came.claimed_by == "s"
    assert await ledger.wait_claim("s", limit=5, timeout_s=SHORT_S) == []


@story
async def test_a_waiting_claim_returns_when_a_claimed_command_is_cancelled(ledger: Ledger) -> None:
    claimed = (await ledger.append(sampling(1))).request_id
    await ledger.claim("s", limit=1)
    waiting = asyncio.create_task(ledger.wait_claim("s", limit=5, timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)

    await ledger.cancel(ended(claimed, b"gone", fail=True))

    assert await waiting == []
    assert await ledger.take_cancelled("s") == [claimed]


@story
async def test_waiting_claims_share_new_commands_and_an_abandoned_claim_takes_none(
    ledger: Ledger,
) -> None:
    """However appends, claims and cancelled claims interleave, each command is claimed once."""
    seen: list[int] = []

    async def schedule(name: str) -> None:
        while len(seen) < 200:
            seen.extend(numbers(await ledger.wait_claim(name, limit=7, timeout_s=SHORT_S)))

    async def submit() -> None:
        for number in range(200):
            await ledger.append(training(number))

    given_up = asyncio.create_task(ledger.wait_claim("gone", limit=5, timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await asyncio.gather(schedule("a"), schedule("b"), submit())

    assert sorted(seen) == list(range(200))
    assert await ledger.release_claims("gone") == 0


@story
async def test_a_cancelled_command_is_reported_to_its_claimer_once(ledger: Ledger) -> None:
    claimed = (await ledger.append(sampling(1))).request_id
    await ledger.claim("s", limit=1)
    pending = (await ledger.append(sampling(2))).request_id
    assert await ledger.cancel(ended(pending, b"gone", fail=True))
    wait = asyncio.create_task(ledger.wait_for_commands("s", timeout_s=LONG_S))
    await asyncio.sleep(SHORT_S)

    assert await ledger.cancel(ended(claimed, b"gone", fail=True))

    assert await wait
    assert await ledger.take_cancelled("other") == []
    assert await ledger.take_cancelled("s") == [claimed]
    assert await ledger.take_cancelled("s") == []
    assert not await ledger.wait_for_commands("s", timeout_s=SHORT_S)
    assert await ledger.settle([ended(claimed)]) == []
    assert await ledger.claim("s", limit=5) == []


@story
async def test_a_settled_command_cannot_be_cancelled(ledger: Ledger) -> None:
    request = (await ledger.append(sampling(1))).request_id
    await ledger.claim("s", limit=1)
    await ledger.settle([ended(request, b"done")])

    assert not await ledger.cancel(ended(request, b"gone", fail=True))
    assert not await ledger.cancel(ended("nonsense", fail=True))
    assert await ledger.take_cancelled("s") == []
    result = await ledger.result(request)
    assert result is not None
    assert result.payload == b"done"


# Queues


@story
async def test_a_seq_id_that_was_passed_over_is_rejected(ledger: Ledger) -> None:
    first = await ledger.append(training(1))
    await ledger.pass_over(MODEL, 5)
    await ledger.pass_over(MODEL, 3)

    message = await raised(ledger.append(training(4)), CommandPassedError)

    assert "the next number is 5" in message
    assert (await ledger.append(training(1))).request_id == first.request_id
    await raised(ledger.append(training(1, b"other")), CommandConflictError)
    assert (await ledger.append(training(5))).is_new
    assert (await ledger.append(training(4, queue_id=QueueId("other")))).is_new
    assert (await ledger.queue(MODEL)).position == 5


@story
async def test_a_snapshot_drops_the_commands_that_it_covers_from_the_replay(ledger: Ledger) -> None:
    for number in range(4):
        await ledger.append(training(number, LARGE))
    await ledger.settle([ended(f"{MODEL}:{number}") for number in range(3)])

    replaced = await ledger.record_snapshot(MODEL, 2, "snapshots/2")

    assert replaced is None
    assert numbers(await ledger.replay(MODEL)) == [2, 3]
    await raised(ledger.payload(f"{MODEL}:1"), UnknownEntryError)
    assert await ledger.payload(f"{MODEL}:2") == LARGE
    progress = await ledger.queue(MODEL)
    assert (progress.position, progress.snapshot_position, progress.snapshot) == (
        2,
        2,
        "snapshots/2",
    )
    assert not (await ledger.append(training(1, LARGE))).is_new


@story
async def test_an_older_snapshot_does_not_replace_a_newer_one(ledger: Ledger) -> None:
    await ledger.record_snapshot(MODEL, 4, "snapshots/4")

    assert await ledger.record_snapshot(MODEL, 2, "snapshots/2") == "snapshots/2"
    assert await ledger.record_snapshot(MODEL, 4, "snapshots/4") is None
    assert (await ledger.queue(MODEL)).snapshot == "snapshots/4"
    assert await ledger.record_snapshot(MODEL, 6, "snapshots/6") == "snapshots/4"


@story
async def test_a_closed_queue_accepts_and_replays_nothing(ledger: Ledger) -> None:
    await ledger.append(training(1))
    await ledger.settle([ended(f"{MODEL}:1")])

    await ledger.record_snapshot(MODEL, LARGEST_NUMBER, None)

    assert await ledger.replay(MODEL) == []
    await raised(ledger.append(training(2)), CommandPassedError)


@story
async def test_spent_seq_ids_are_remembered_until_used_or_snapshotted(ledger: Ledger) -> None:
    for number in (5, 1, 3, 3):
        await ledger.spend(MODEL, number)
    await ledger.append(training(3))
    assert await ledger.spent(MODEL) == [1, 5]
    assert await ledger.spent(QueueId("other")) == []

    await ledger.record_snapshot(MODEL, 2, None)

    assert await ledger.spent(MODEL) == [5]


@story
async def test_an_unused_queue_is_at_position_zero(ledger: Ledger) -> None:
    progress = await ledger.queue(QueueId("unknown"))

    assert (progress.position, progress.snapshot, progress.asked_at) == (0, None, None)


@story
async def test_commands_of_a_session_are_paginated(ledger: Ledger) -> None:
    for number in range(5):
        await ledger.append(training(number))
    first = await ledger.commands_of(SESSION, limit=3)

    rest = await ledger.commands_of(SESSION, after=first[-1].ordinal)

    assert numbers(first + rest) == list(range(5))
    assert await ledger.commands_of(SessionId("other")) == []


# Life


@story
async def test_calls_on_a_closed_ledger_say_that_it_is_closed(ledger: Ledger) -> None:
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unseen.append(told))
    request = (await ledger.append(training(1))).request_id
    waits = [
        asyncio.create_task(ledger.wait_settled(request, timeout_s=LONG_S)),
        asyncio.create_task(ledger.wait_completions(SAMPLER, 0, after=0, timeout_s=LONG_S)),
        asyncio.create_task(_claimed(ledger)),
    ]
    await asyncio.sleep(SHORT_S)

    await ledger.close()
    await ledger.close()

    while waits:
        await raised(waits.pop(), LedgerUnavailableError)
    await raised(ledger.append(training(2)), LedgerUnavailableError)
    await raised(ledger.command(request), LedgerUnavailableError)
    gc.collect()
    assert unseen == []


async def _claimed(ledger: Ledger) -> None:
    """Wait for more commands than there are."""
    while True:
        await ledger.wait_claim("s", limit=5, timeout_s=LONG_S)


@story
async def test_cancelling_a_caller_leaves_the_ledger_consistent(ledger: Ledger) -> None:
    """An append whose caller went away happened or did not; either way it can be made again."""
    for queue_id, payload in ((QueueId("small"), b"small"), (QueueId("large"), LARGE)):
        for number in range(20):
            task = asyncio.create_task(ledger.append(training(number, payload, queue_id)))
            for _turn in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            appended = await ledger.append(training(number, payload, queue_id))
            assert await ledger.payload(appended.request_id) == payload
        assert (await ledger.sweep()).files == 0
        assert numbers(await ledger.replay(queue_id)) == list(range(20))


@story
async def test_the_writability_check_leaves_nothing_behind(ledger: Ledger) -> None:
    await ledger.append(training(1))
    before = await ledger.statistics()

    await ledger.check_writable()

    after = await ledger.statistics()
    assert after.payload_bytes == before.payload_bytes
    assert after.payload_files == before.payload_files
    assert await ledger.spent(QueueId("")) == []
    assert (await ledger.sweep()).files == 0


@story
async def test_statistics_count_what_the_ledger_holds(ledger: Ledger, place: Place) -> None:
    for number in range(3):
        await ledger.append(sampling(number, b"12345678"))
    await ledger.claim("s", limit=2)
    await ledger.settle([ended(f"{SAMPLER}:0", LARGE)])
    place.clock.wait(7)

    seen = await ledger.statistics()

    assert (seen.pending, seen.claimed) == (1, 1)
    assert seen.oldest_pending_s == pytest.approx(7)
    assert seen.payload_bytes == 2 * 8 + len(LARGE)
    assert seen.payload_files == (1 if place.has_files else 0)
    assert (seen.stored_bytes > 0) == place.is_durable
    assert seen.writes == 5


# The lease


async def lost_and_newest(ledger: Ledger) -> tuple[Lease, Lease]:
    """A lease that was not renewed in time, and the one that another scheduler then took."""
    lost = await ledger.acquire_lease("first", lease_s=0.05)
    return lost, await ledger.acquire_lease("second", wait_s=LONG_S)


@story
async def test_each_lease_has_a_larger_epoch_than_all_earlier_ones(
    ledger: Ledger, place: Place
) -> None:
    lost, newest = await lost_and_newest(ledger)
    await ledger.renew_lease(newest)
    await ledger.release_lease(newest)

    again = await ledger.acquire_lease("third")

    assert lost.epoch < newest.epoch < again.epoch
    await raised(ledger.renew_lease(newest), LeaseLostError)
    await ledger.release_lease(again)
    if place.is_durable:
        await ledger.close()
        async with await place.open() as opened:
            assert (await opened.acquire_lease("fourth")).epoch > again.epoch


async def _claim(ledger: Ledger, epoch: int) -> None:
    await ledger.claim("s", limit=9, epoch=epoch)


async def _wait_claim(ledger: Ledger, epoch: int) -> None:
    await ledger.wait_claim("s", limit=9, timeout_s=0.0, epoch=epoch)


async def _release_claims(ledger: Ledger, epoch: int) -> None:
    await ledger.release_claims("s", epoch=epoch)


async def _take_cancelled(ledger: Ledger, epoch: int) -> None:
    await ledger.take_cancelled("s", epoch=epoch)


async def _settle(ledger: Ledger, epoch: int) -> None:
    await ledger.settle([ended(f"{MODEL}:1")], epoch=epoch)


async def _settle_large(ledger: Ledger, epoch: int) -> None:
    await ledger.settle([ended(f"{MODEL}:1", LARGE)], epoch=epoch)


async def _pass_over(ledger: Ledger, epoch: int) -> None:
    await ledger.pass_over(MODEL, 7, epoch=epoch)


async def _record_snapshot(ledger: Ledger, epoch: int) -> None:
    await ledger.record_snapshot(MODEL, 2, "snapshot", epoch=epoch)


async def _add_uses(ledger: Ledger, epoch: int) -> None:
    key = UsageKey(tenant_id=TENANT, kind="tokens")
    await ledger.add_uses([Use(key=key, amount=3.0)], epoch=epoch)


async def _add(ledger: Ledger, epoch: int) -> None:
    await ledger.entries(SessionEntry, epoch=epoch).add(a_session("added"))


async def _put(ledger: Ledger, epoch: int) -> None:
    await ledger.entries(SessionEntry, epoch=epoch).put(a_session(at=99.0))


async def _change(ledger: Ledger, epoch: int) -> None:
    await ledger.entries(SessionEntry, epoch=epoch).change(
        SESSION, lambda kept: msgspec.structs.replace(kept, project_id="changed")
    )


async def _remove(ledger: Ledger, epoch: int) -> None:
    await ledger.entries(SessionEntry, epoch=epoch).remove(SESSION)


async def everything(ledger: Ledger) -> object:
    """All that a scheduler's write could change."""
    return (
        [await ledger.command(f"{MODEL}:{number}") for number in (1, 2, 3)],
        await ledger.result(f"{MODEL}:1"),
        await ledger.queue(MODEL),
        await ledger.entries(SessionEntry).all(),
        await ledger.usage(TENANT, since=0.0, before=2e9),
    )


@pytest.mark.parametrize(
    "write",
    [
        *(_claim, _wait_claim, _release_claims, _take_cancelled, _settle, _settle_large),
        *(_pass_over, _record_snapshot, _add_uses, _add, _put, _change, _remove),
    ],
)
def test_a_scheduler_that_lost_its_lease_cannot_write(
    place: Place, write: Callable[[Ledger, int], Awaitable[None]]
) -> None:
    async def tell() -> None:
        async with await place.open() as ledger:
            lost, newest = await lost_and_newest(ledger)
            await ledger.entries(SessionEntry).add(a_session())
            for number in (1, 2):
                await ledger.append(training(number))
            await ledger.claim("s", limit=2, epoch=newest.epoch)
            await ledger.cancel(ended(f"{MODEL}:2"))
            await ledger.append(training(3))
            before = await everything(ledger)

            told = await raised(write(ledger, lost.epoch), LeaseLostError)

            assert await everything(ledger) == before
            assert f"epoch {newest.epoch}" in told
            assert await ledger.take_cancelled("s", epoch=newest.epoch) == [f"{MODEL}:2"]
            await write(ledger, newest.epoch)

    asyncio.run(tell())


@story
async def test_a_write_that_is_fenced_off_does_not_fail_other_writes(
    ledger: Ledger,
) -> None:
    """All of them are asked for at the same moment, and go into one commit where there is one."""
    lost, newest = await lost_and_newest(ledger)
    for number in range(4):
        await ledger.append(training(number))

    told = await asyncio.gather(
        *(
            ledger.settle([ended(f"{MODEL}:{number}")], epoch=(lost, newest)[number % 2].epoch)
            for number in range(4)
        ),
        ledger.append(training(4)),
        return_exceptions=True,
    )

    assert [isinstance(one, LeaseLostError) for one in told] == [True, False, True, False, False]
    states = [(await ledger.command(f"{MODEL}:{number}")).is_settled for number in range(5)]
    assert states == [False, True, False, True, False]
