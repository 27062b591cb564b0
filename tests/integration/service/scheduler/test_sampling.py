"""Samples, from the ledger through the fake engine and back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.scheduler.bench import BASE, QUICK, Bench, bench, until
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import SampleEvent, SampleOutcome, SampleTokens
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.errors import RequestErrorCategory
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import RequestId, SamplerEntry, Settlement, TenantId
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.requests import SaveWeightsForSamplerRequest
from tinsmith.types.sampling import SampledSequence, SampleResponse
from tinsmith.wire.failures import failed_from_error
from tinsmith.wire.stored import stored_failure

pytestmark = pytest.mark.usefixtures("each_ledger")

LINE = "session-1:train:0"
SAMPLER = "session-1:sample:0"


async def _cancel(b: Bench, request_id: RequestId) -> None:
    payload = stored_failure(failed_from_error(RuntimeError()))
    await b.ledger.cancel(Settlement(request_id=request_id, payload=payload, is_failed=True))


def test_a_base_model_sample_is_completed_and_counted(tmp_path: Path) -> None:
    """All its sequences come, and what it used is recorded."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.add_sampler(SAMPLER)
            drawn = await b.result(await b.sample(SAMPLER, 0, num_samples=2, max_tokens=7))
            rows = await b.ledger.usage(TenantId("tenant"), since=0, before=1e12)

        assert [len(sequence.tokens) for sequence in drawn.sequences] == [7, 7]
        amounts = {row.key.kind: row.amount for row in rows}
        assert amounts == {"sampling_prefill": 3, "sampling_sample": 14}

    asyncio.run(run())


def test_an_ephemeral_sampler_samples_from_the_weights_at_its_save(tmp_path: Path) -> None:
    """Its weights are those of the save, whatever is trained after."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await b.forward_backward(LINE, 1)
            await b.step(LINE, 2)
            for number, seq in ((3, 7), (6, 8)):
                request = SaveWeightsForSamplerRequest(
                    model_id=LINE, seq_id=number, sampling_session_seq_id=seq
                )
                saved = await b.result(
                    await b.submit(LINE, number, "save_weights_for_sampler", request)
                )
                assert saved.sampling_session_id == f"session-1:sample:{seq}"
                await b.forward_backward(LINE, number + 1)
                await b.step(LINE, number + 2)
            entry = await b.ledger.entries(SamplerEntry).get("session-1:sample:7")
            asked: dict[str, Any] = {"prompt_logprobs": True, "prompt": (1, 2, 3, 5), "seed": 1}
            first = await b.result(await b.sample("session-1:sample:7", 0, **asked))
            again = await b.result(await b.sample("session-1:sample:7", 1, **asked))
            later = await b.result(await b.sample("session-1:sample:8", 0, **asked))

        assert entry is not None
        assert first.prompt_logprobs == again.prompt_logprobs
        assert first.sequences[0].tokens == again.sequences[0].tokens
        assert first.prompt_logprobs != later.prompt_logprobs

    asyncio.run(run())


def test_a_cancelled_sample_leaves_the_engine_immediately(tmp_path: Path) -> None:
    """Its place is free for the next one."""

    async def run() -> None:
        slow = FakeSettings(step_s=0.01, tokens_per_step=1, most_samples=1)
        async with bench(tmp_path, fake=slow) as b:
            await b.add_sampler(SAMPLER)
            endless = await b.sample(SAMPLER, 0, max_tokens=100_000)
            queued = await b.sample(SAMPLER, 1, max_tokens=100_000)
            last = await b.sample(SAMPLER, 2, max_tokens=1)
            await until(lambda: b.engine.capacity().samples == 1)
            await _cancel(b, queued)
            await _cancel(b, endless)

            drawn = await b.result(last)

            assert len(drawn.sequences[0].tokens) == 1
            assert b.engine.capacity().samples == 0
            assert b.scheduler.statistics()["held_commands"] == 0

    asyncio.run(run())


class LateEngine(FakeEngine):
    """Reports a cancelled sample once more: its events were on their way."""

    def __init__(self) -> None:
        super().__init__([fake_model(BASE)], FakeSettings(step_s=0.01, tokens_per_step=1))
        self.late: list[SampleEvent] = []
        self.reported: list[SampleEvent] = []

    def cancel(self, work_id: str) -> None:
        super().cancel(work_id)
        sequence = SampledSequence("length", tokens=[7], logprobs=[-1.0])
        result = SampleResponse([sequence])
        self.late.append(SampleTokens(work_id=work_id, sequence=0, tokens=(7,), logprobs=(-1.0,)))
        self.late.append(SampleOutcome(work_id=work_id, result=result))

    async def step_sampler(self) -> list[SampleEvent]:
        events = await super().step_sampler()
        self.reported += self.late
        events, self.late = [*self.late, *events], []
        return events


def test_engine_events_of_a_cancelled_sample_are_ignored(tmp_path: Path) -> None:
    async def run() -> None:
        ledger, engine = MemoryLedger(), LateEngine()
        b = Bench(tmp_path, ledger)
        b.engine, b.scheduler = engine, Scheduler(ledger, engine, b.store, QUICK)
        await b.open()
        await b.add_sampler(SAMPLER)
        cancelled = await b.sample(SAMPLER, 0, max_tokens=100_000)
        assert ledger.board.watch(cancelled)
        other = await b.sample(SAMPLER, 1, max_tokens=100_000)
        await until(lambda: engine.capacity().samples == 2)

        await _cancel(b, cancelled)
        await until(lambda: len(engine.reported) == 2)
        ended = await b.result(cancelled)
        told = await ledger.board.wait_tokens(cancelled, 0, timeout_s=0.0)
        figures = b.scheduler.statistics()
        await _cancel(b, other)
        await b.close()

        assert isinstance(ended, RequestFailedResponse)
        assert (-1.0,) not in [piece.logprobs for piece in told]
        assert figures.get("done_samples", 0) == 0
        assert figures["held_commands"] == 1  # the other one

    asyncio.run(run())


def test_tokens_of_a_watched_sample_are_published_as_they_are_sampled(tmp_path: Path) -> None:
    """Piece by piece, and together they are the result."""

    async def run() -> None:
        async with bench(tmp_path, fake=FakeSettings(tokens_per_step=2)) as b:
            await b.add_sampler(SAMPLER)
            board, request_id = b.ledger.board, f"{SAMPLER}:0"
            assert board.watch(request_id)
            await b.sample(SAMPLER, 0, max_tokens=6)
            result = await b.result(request_id)
            pieces = await board.wait_tokens(request_id, 0, timeout_s=0)
            board.unwatch(request_id)

        assert [len(piece.tokens) for piece in pieces] == [2, 2, 2]
        assert [t for piece in pieces for t in piece.tokens] == result.sequences[0].tokens
        assert [x for piece in pieces for x in piece.logprobs] == pytest.approx(
            result.sequences[0].logprobs
        )

    asyncio.run(run())


def test_a_tenant_s_single_sample_does_not_wait_for_another_s_thousand(tmp_path: Path) -> None:
    """Admission is by tenant."""

    async def run() -> None:
        slow = FakeSettings(step_s=0.005, tokens_per_step=1, most_samples=4)
        async with bench(tmp_path, fake=slow) as b:
            await b.add_sampler(SAMPLER, tenant="many")
            await b.add_sampler("session-2:sample:0", tenant="one")
            many = await asyncio.gather(
                *(b.sample(SAMPLER, n, tenant="many", max_tokens=2) for n in range(1000))
            )
            await b.result(await b.sample("session-2:sample:0", 0, tenant="one"))
            last = await b.ledger.command(many[-1])

            assert not last.is_settled

    asyncio.run(run())


def test_a_tenant_gets_a_slot_despite_another_s_endless_samples(tmp_path: Path) -> None:
    """No tenant fills the engine, so nobody has to wait for the end of another's sample."""

    async def run() -> None:
        slow = FakeSettings(step_s=0.001, tokens_per_step=1, most_samples=8)
        async with bench(tmp_path, fake=slow) as b:
            await b.add_sampler(SAMPLER, tenant="many")
            await b.add_sampler("session-2:sample:0", tenant="one")
            endless = [
                await b.sample(SAMPLER, n, tenant="many", max_tokens=100_000) for n in range(30)
            ]
            await until(lambda: b.engine.capacity().samples >= 6)
            for number in range(3):
                drawn = await b.result(await b.sample("session-2:sample:0", number, tenant="one"))
                assert len(drawn.sequences[0].tokens) == 5
            for request_id in endless:
                await _cancel(b, request_id)

    asyncio.run(run())


def test_training_continues_beside_endless_samples(tmp_path: Path) -> None:
    """They share the engine's time, though a batch takes as long as twenty steps.

    The time is that of the clock: where the machine stops one of the two, they are run again.
    """

    async def run(folder: Path) -> float:
        slow = FakeSettings(step_s=0.001, batch_s=0.02, tokens_per_step=1)
        async with bench(folder, fake=slow) as b:
            await b.result(await b.create(LINE))
            await b.add_sampler(SAMPLER)
            endless = [await b.sample(SAMPLER, n, max_tokens=100_000) for n in range(3)]
            await until(lambda: b.engine.capacity().samples == 3)
            before = b.scheduler.statistics()
            ids = [
                one
                for n in range(1, 20, 2)
                for one in (await b.forward_backward(LINE, n), await b.step(LINE, n + 1))
            ]
            for request_id in ids:
                await b.result(request_id)
            after = b.scheduler.statistics()
            for request_id in endless:
                await _cancel(b, request_id)

        trained = after["training_s"] - before["training_s"]
        sampled = after["sampling_s"] - before["sampling_s"]
        return sampled / trained

    shares: list[float] = []
    while len(shares) < 10 and not any(0.4 < share < 2.5 for share in shares):
        shares.append(asyncio.run(run(tmp_path / str(len(shares)))))

    assert any(0.4 < share < 2.5 for share in shares), shares


def test_a_sample_without_weights_fails_with_category_user(tmp_path: Path) -> None:
    """A checkpoint that is gone, a sampler that never was, and one that made room for others."""
    nameless = "session-1:sample:1"

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.add_sampler(SAMPLER, path="tinker://gone/sampler_weights/x")
            await b.add_sampler(nameless, path=str(CheckpointPath.sampler(nameless)))
            gone = await b.result(await b.sample(SAMPLER, 0))
            never = await b.result(await b.sample("session-9:sample:0", 0, base_model=BASE))
            removed = await b.result(await b.sample(nameless, 0))

        for failed in (gone, never, removed):
            assert isinstance(failed, RequestFailedResponse)
            assert failed.category is RequestErrorCategory.User
        assert "save them under a name to keep them" in removed.error

    asyncio.run(run())


def test_the_least_recently_used_weights_are_evicted(tmp_path: Path) -> None:
    """And are loaded again when they are asked for."""

    async def run() -> None:
        few = SchedulerSettings(most_sampler_weights=1)
        async with bench(tmp_path, settings=few) as b:
            await b.create(LINE)
            for number in (1, 2):
                request = SaveWeightsForSamplerRequest(
                    model_id=LINE, seq_id=number, sampling_session_seq_id=number
                )
                await b.result(await b.submit(LINE, number, "save_weights_for_sampler", request))
            for number, sampler in enumerate((1, 2, 1)):
                drawn = await b.result(await b.sample(f"session-1:sample:{sampler}", number))
                assert not isinstance(drawn, RequestFailedResponse)

            assert b.scheduler.statistics()["loaded_weights"] == 3

    asyncio.run(run())
