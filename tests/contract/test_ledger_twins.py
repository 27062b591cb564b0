"""Whatever is done to them in whatever order, the SQLite ledger and the one in memory agree.

The two share no code for what they decide, so a difference is a mistake in one of them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.contract.ledgers import (
    INLINE_BYTES,
    MODEL,
    SAMPLER,
    SESSION,
    TENANT,
    SetClock,
    a_session,
    ended,
    sampling,
    training,
)
from tinsmith.errors import TinkerError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    Command,
    Completion,
    ModelEntry,
    QueueId,
    Retention,
    SessionEntry,
    Submission,
    UsageKey,
    Use,
)
from tinsmith.service.ledger.recovery import recover
from tinsmith.service.ledger.sqlite import SqliteLedger

KEEP = Retention(result_s=50, command_s=100, session_s=150, audit_s=200, usage_s=250)
LARGE = b"x" * (INLINE_BYTES * 2)

QUEUES = st.sampled_from([MODEL, QueueId("session-0:train:1")])
NUMBERS = st.integers(0, 6)
PAYLOADS = st.sampled_from([b"", b"small", LARGE])
CLAIMERS = st.sampled_from(["a", "b"])
REQUESTS = st.one_of(
    st.builds("{}:{}".format, st.one_of(QUEUES, st.just(SAMPLER)), NUMBERS), st.just("nonsense")
)


def comparable(value: Any) -> Any:
    """A value without the numbers that each ledger chooses for itself."""
    if isinstance(value, Command):
        return msgspec.structs.replace(value, ordinal=0)
    if isinstance(value, Completion):
        return msgspec.structs.replace(value, cursor=0)
    if isinstance(value, list):
        return [comparable(one) for one in value]
    return value


class Twins(RuleBasedStateMachine):
    """Does the same to both, and compares what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tinsmith-twins-"))
        self.clock = SetClock()
        self.runner = asyncio.Runner()
        self.memory: Ledger = MemoryLedger(retention=KEEP, clock=self.clock.steady())
        self.sqlite = self.runner.run(self.opened())

    async def opened(self) -> Ledger:
        return await SqliteLedger.open(
            self.folder, retention=KEEP, clock=self.clock.steady(), inline_bytes=INLINE_BYTES
        )

    def teardown(self) -> None:
        self.runner.run(self.sqlite.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    def both(self, ask: Callable[[Ledger], Awaitable[Any]]) -> Any:
        """Ask both ledgers the same, and return their common answer."""
        answers = [self.runner.run(_told(ask(ledger))) for ledger in (self.memory, self.sqlite)]
        assert answers[0] == answers[1]
        return answers[0]

    # What clients and the server do

    @rule(queue_id=QUEUES, number=st.one_of(NUMBERS, st.none()), payload=PAYLOADS)
    def train(self, queue_id: QueueId, number: int | None, payload: bytes) -> None:
        self.append(training(number, payload, queue_id))

    @rule(number=NUMBERS, payload=PAYLOADS, clone=st.integers(0, 1))
    def sample(self, number: int, payload: bytes, clone: int) -> None:
        self.append(sampling(number, payload, clone))

    def append(self, submission: Submission) -> None:
        self.both(lambda ledger: ledger.append(submission))

    @rule(request=REQUESTS, payload=PAYLOADS)
    def cancel(self, request: str, payload: bytes) -> None:
        self.both(lambda ledger: ledger.cancel(ended(request, payload, fail=True)))

    @rule(requests=st.lists(REQUESTS, max_size=3))
    def acknowledge(self, requests: list[str]) -> None:
        self.both(lambda ledger: ledger.acknowledge(requests))

    @rule(queue_id=QUEUES, number=NUMBERS)
    def spend(self, queue_id: QueueId, number: int) -> None:
        self.both(lambda ledger: ledger.spend(queue_id, number))

    # What the scheduler does

    @rule(claimer=CLAIMERS, limit=st.integers(1, 3))
    def claim(self, claimer: str, limit: int) -> None:
        self.both(lambda ledger: ledger.claim(claimer, limit=limit))

    @rule(claimer=CLAIMERS)
    def take_cancelled(self, claimer: str) -> None:
        self.both(lambda ledger: ledger.take_cancelled(claimer))

    @rule(
        requests=st.lists(REQUESTS, max_size=3, unique=True), payload=PAYLOADS, fail=st.booleans()
    )
    def settle(self, requests: list[str], payload: bytes, fail: bool) -> None:
        use = Use(key=UsageKey(tenant_id=TENANT, kind="training"), amount=1.5)
        ends = [ended(request, payload, use, fail=fail) for request in requests]
        self.both(lambda ledger: ledger.settle(ends))

    @rule(queue_id=QUEUES, position=NUMBERS)
    def pass_over(self, queue_id: QueueId, position: int) -> None:
        self.both(lambda ledger: ledger.pass_over(queue_id, position))

    @rule(queue_id=QUEUES, position=NUMBERS, reference=st.sampled_from([None, "one", "two"]))
    def snapshot(self, queue_id: QueueId, position: int, reference: str | None) -> None:
        self.both(lambda ledger: ledger.record_snapshot(queue_id, position, reference))

    @rule(claimer=CLAIMERS)
    def recover(self, claimer: str) -> None:
        recovery = self.both(lambda ledger: _recovered(ledger, claimer))
        assert recovery is not None

    # Entries

    @rule(session=st.sampled_from([SESSION, "session-1"]), has_ended=st.booleans())
    def put_session(self, session: str, has_ended: bool) -> None:
        now = self.clock.ticks
        made = a_session(session, at=self.memory.now(), display_name=str(now))
        if has_ended:
            made = msgspec.structs.replace(made, ended_at=self.memory.now())
        self.both(lambda ledger: ledger.entries(SessionEntry).put(made))

    @rule(queue_id=QUEUES)
    def add_model(self, queue_id: QueueId) -> None:
        made = ModelEntry(
            id=queue_id, tenant_id=TENANT, created_at=1.0, session_id=SESSION, base_model="tiny"
        )
        self.both(lambda ledger: ledger.entries(ModelEntry).add(made))

    # Time and accidents

    @rule(seconds=st.sampled_from([1, 60, 500]))
    def wait(self, seconds: int) -> None:
        self.clock.wait(seconds)

    @rule()
    def sweep(self) -> None:
        swept = [self.runner.run(one.sweep()) for one in (self.memory, self.sqlite)]
        # Files that were just let go of are deleted by whoever comes first.
        assert msgspec.structs.replace(swept[1], files=0) == swept[0]
        named = self.runner.run(self.sqlite.statistics()).payload_files
        files = [path for path in (self.folder / "payloads").rglob("*") if path.is_file()]
        assert len(files) == named

    @precondition(lambda self: self.folder.exists())
    @rule()
    def restart(self) -> None:
        self.runner.run(self.sqlite.close())
        self.sqlite = self.runner.run(self.opened())

    @invariant()
    def they_agree(self) -> None:
        self.both(_view)


async def _recovered(ledger: Ledger, claimer: str) -> list[Any]:
    recovery = await recover(ledger, claimer)
    redo = [comparable(model.redo) for model in recovery.models]
    return [recovery.released, redo, [model.progress for model in recovery.models]]


async def _told(answer: Awaitable[Any]) -> Any:
    try:
        return comparable(await answer)
    except TinkerError as exc:
        return type(exc), str(exc)


async def _view(ledger: Ledger) -> list[Any]:
    """All that can be read of a ledger."""
    seen = await ledger.statistics()
    asked: list[Awaitable[Any]] = [
        ledger.commands_of(SESSION),
        *(ledger.completions(SAMPLER, clone, after=0) for clone in (0, 1)),
        ledger.entries(SessionEntry).due(1e12),
        ledger.usage(TENANT, since=0, before=1e12),
    ]
    for queue_id in (MODEL, SAMPLER):
        asked += [ledger.queue(queue_id), ledger.spent(queue_id), ledger.replay(queue_id)]
        asked += [ledger.result(f"{queue_id}:1"), ledger.payload(f"{queue_id}:1")]
    return [
        (seen.pending, seen.claimed, seen.payload_bytes, seen.oldest_pending_s),
        *[await _told(one) for one in asked],
    ]


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=25, stateful_step_count=30)
