"""Commands of models, from the ledger through the fake engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.service.scheduler.bench import BASE, QUICK, Bench, bench, until
from tests.numerics.small_models import make_model
from tinsmith.engine.base import StepWork, TrainingOutcome, TrainingWork, has_uploaded_loss
from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.errors import CommandPassedError, RequestErrorCategory
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    CommandState,
    CustomLossEntry,
    ModelEntry,
    QueueId,
    SessionId,
    Settlement,
    TenantId,
)
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.requests import CreateCustomLossRequest, UnloadModelRequest
from tinsmith.types.training import CreateModelResponse
from tinsmith.wire.failures import failed_from_error
from tinsmith.wire.stored import stored_failure

pytestmark = pytest.mark.usefixtures("each_ledger")

LINE = "session-1:train:0"


def test_a_model_is_created_trained_and_stepped(tmp_path: Path) -> None:
    """The road of a training run: every command settles with its result, and the loss falls."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            made = await b.result(await b.create(LINE))
            first = await b.result(await b.forward_backward(LINE, 1))
            stepped = await b.result(await b.step(LINE, 2))
            second = await b.result(await b.forward_backward(LINE, 3, forward_only=True))

        assert made == CreateModelResponse(model_id=LINE)
        assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
        assert stepped.metrics["tinsmith/step"] == 1

    asyncio.run(run())


async def _submit_all(b: Bench, numbers: list[int], queue_id: str = LINE) -> list[str]:
    """Commands whose effects depend on their order: every third is a step."""
    ids: list[str] = []
    for number in numbers:
        if number == 0:
            ids.append(await b.create(queue_id))
        elif number % 3 == 0:
            ids.append(await b.step(queue_id, number))
        else:
            ids.append(await b.forward_backward(queue_id, number, (number, 2, 3), weight=number))
    return ids


@given(st.permutations(range(1, 10)))
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the same for all examples
)
def test_commands_run_in_seq_id_order(numbers: list[int]) -> None:
    """However they arrive, the weights are those of the order that the client gave."""

    async def run(order: list[int], folder: Path) -> dict[str, bytes]:
        async with bench(folder, settings=SchedulerSettings(gap_wait_s=60)) as b:
            for request_id in await _submit_all(b, [0, *order]):
                assert not isinstance(await b.result(request_id), RequestFailedResponse)
            return await b.weights(LINE, "end")

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        in_order = asyncio.run(run(list(range(1, 10)), Path(first)))
        as_given = asyncio.run(run(numbers, Path(second)))

    assert in_order == as_given


def test_a_missing_seq_id_is_skipped_after_a_while(tmp_path: Path) -> None:
    """The line goes on, and from then on the number is refused."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.result(await b.create(LINE))
            later = await b.forward_backward(LINE, 2)
            await until(lambda: b.ledger.board.queue_state(LINE).state == "paused_capacity")

            result = await b.result(later)

            assert result.metrics["loss:sum"] > 0
            with pytest.raises(CommandPassedError):
                await b.forward_backward(LINE, 1)
            await until(lambda: b.ledger.board.queue_state(LINE).state == "active")
            assert b.scheduler.statistics()["skipped_numbers"] == 1

    asyncio.run(run())


def test_a_rejected_seq_id_is_not_waited_for(tmp_path: Path) -> None:
    """The server spends what it refuses; the line goes on long before the wait is over."""

    async def run() -> None:
        never = SchedulerSettings(gap_wait_s=3600, gap_look_s=0.02)
        async with bench(tmp_path, settings=never) as b:
            await b.result(await b.create(LINE))
            later = await b.forward_backward(LINE, 3)
            await b.ledger.spend(QueueId(LINE), 1)
            await b.ledger.spend(QueueId(LINE), 2)

            await b.result(later)

            assert b.scheduler.statistics().get("skipped_numbers", 0) == 0

    asyncio.run(run())


def test_a_failed_command_does_not_stop_its_queue(tmp_path: Path) -> None:
    """It is settled as the user's mistake, changes nothing, and the next one runs."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            wrong = await b.forward_backward(LINE, 1, loss="ppo")
            right = await b.forward_backward(LINE, 2)

            failed, done = await b.result(wrong), await b.result(right)

        assert failed.category is RequestErrorCategory.User
        assert "logprobs" in failed.error
        assert done.metrics["loss:sum"] > 0

    asyncio.run(run())


def test_an_engine_fault_is_a_server_error_without_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole batch that fails is settled as such, and the next one runs."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.result(await b.create(LINE))
            train = b.engine.train

            async def broken(_: object) -> list[object]:
                monkeypatch.setattr(b.engine, "train", train)
                raise RuntimeError("the secret inside")

            monkeypatch.setattr(b.engine, "train", broken)
            failed = await b.result(await b.forward_backward(LINE, 1))
            done = await b.result(await b.forward_backward(LINE, 2))

        assert failed.category is RequestErrorCategory.Server
        assert "secret" not in failed.error
        assert done.metrics["loss:sum"] > 0

    asyncio.run(run())


def test_commands_of_a_model_that_could_not_be_created_fail_with_the_reason(tmp_path: Path) -> None:
    """Each of them fails with the reason of the first."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            first = await b.result(await b.create(LINE, base="unknown/model"))
            later = await b.result(await b.forward_backward(LINE, 1))

        assert first.category is later.category is RequestErrorCategory.User
        assert "could not be created" in later.error
        assert "unknown/model" in later.error

    asyncio.run(run())


def test_a_model_waits_for_a_free_adapter_slot(tmp_path: Path) -> None:
    """While all places are taken its state says so; it is made when one is let go of."""

    async def run() -> None:
        async with bench(tmp_path, fake=FakeSettings(most_adapters=1)) as b:
            await b.result(await b.create(LINE))
            other = await b.create("session-1:train:1")
            await until(
                lambda: b.ledger.board.queue_state("session-1:train:1").state == "paused_capacity"
            )
            await b.submit(LINE, 1, "unload_model", UnloadModelRequest(model_id=LINE))

            made = await b.result(other)

            assert made.model_id == "session-1:train:1"
            assert b.ledger.board.queue_state("session-1:train:1").state == "active"
            assert "unloaded" in (await b.result(await b.forward_backward(LINE, 2))).error
            entry = await b.ledger.entries(ModelEntry).get(LINE)
            assert entry is not None and entry.released_at is not None

    asyncio.run(run())


def test_commands_of_many_models_share_batches(tmp_path: Path) -> None:
    """Heads of lines with the same base model run together."""

    async def run() -> None:
        patient = SchedulerSettings(gap_wait_s=60)
        async with bench(tmp_path, settings=patient, fake=FakeSettings(batch_s=0.05)) as b:
            queues = [f"session-1:train:{n}" for n in range(8)]
            for queue_id in queues:
                await b.result(await b.create(queue_id))
            before = b.scheduler.statistics().get("batches", 0)
            # The second of each waits for the first, and the first ones come together.
            later = await asyncio.gather(*(b.forward_backward(queue_id, 2) for queue_id in queues))
            first = await asyncio.gather(*(b.forward_backward(queue_id, 1) for queue_id in queues))
            for request_id in [*first, *later]:
                await b.result(request_id)

            assert b.scheduler.statistics()["batches"] - before <= 8

    asyncio.run(run())


def test_a_tenant_s_single_request_does_not_wait_for_another_s_thousand(tmp_path: Path) -> None:
    """What comes last of a thousand is not waited for."""

    async def run() -> None:
        slow = FakeSettings(batch_s=0.002)
        few = SchedulerSettings(most_batch_commands=4)
        async with bench(tmp_path, fake=slow, settings=few) as b:
            many, one = "session-1:train:0", "session-2:train:0"
            await b.result(await b.create(many, tenant="many"))
            await b.result(await b.create(one, tenant="one"))
            thousand = await asyncio.gather(
                *(b.forward_backward(many, n, tenant="many") for n in range(1, 1001))
            )
            await b.result(await b.forward_backward(one, 1, tenant="one"))
            last = await b.ledger.command(thousand[-1])

            assert not last.is_settled

    asyncio.run(run())


def test_a_command_cancelled_in_its_queue_is_dropped(tmp_path: Path) -> None:
    """The next one runs as if it had not been there."""

    async def run() -> None:
        async with bench(tmp_path, fake=FakeSettings(batch_s=1.0)) as b:
            await b.create(LINE)
            await b.step(LINE, 1)
            dropped = await b.forward_backward(LINE, 2)
            last = await b.forward_backward(LINE, 3)
            await until(lambda: b.scheduler.statistics()["queued_commands"] >= 2)
            failed = stored_failure(failed_from_error(RuntimeError()))
            await b.ledger.cancel(Settlement(request_id=dropped, payload=failed, is_failed=True))

            await b.result(last)

            assert b.scheduler.statistics()["cancelled_commands"] == 1

    asyncio.run(run())


def test_training_is_counted_by_tenant_and_run(tmp_path: Path) -> None:
    """The tokens of each pass, in the hour in which it was settled."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await b.result(await b.forward_backward(LINE, 1, (1, 2, 3, 4)))
            rows = await b.ledger.usage(TenantId("tenant"), since=0, before=1e12)

        assert [(row.key.kind, row.amount) for row in rows] == [("training", 4)]
        assert rows[0].key.session_id == SessionId("session-1")
        assert rows[0].key.base_model == BASE

    asyncio.run(run())


def test_closing_releases_commands_that_did_not_run(tmp_path: Path) -> None:
    """What is not done within the time is pending, and whoever comes next does it."""

    async def run() -> None:
        ledger = MemoryLedger()
        first = Bench(tmp_path, ledger, fake=FakeSettings(batch_s=0.1))
        await first.open()
        await first.create(LINE)
        ids = [
            request
            for n in range(1, 20, 2)
            for request in (await first.forward_backward(LINE, n), await first.step(LINE, n + 1))
        ]
        await first.close(drain_s=5)
        states = [(await ledger.command(one)).state for one in ids]
        async with bench(tmp_path, ledger) as second:
            results = [await second.result(request_id) for request_id in ids]

        assert states[-1] is CommandState.PENDING
        assert CommandState.CLAIMED not in states
        assert not any(isinstance(result, RequestFailedResponse) for result in results)
        assert results[-1].metrics["tinsmith/step"] == 10

    asyncio.run(run())


def test_a_command_that_is_submitted_twice_runs_once(tmp_path: Path) -> None:
    """However often and however late it is repeated."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            ids = await asyncio.gather(*(b.forward_backward(LINE, 1) for _ in range(5)))
            await b.result(ids[0])
            ids.append(await b.forward_backward(LINE, 1))
            await b.result(await b.step(LINE, 2))

            assert set(ids) == {f"{LINE}:1"}
            assert b.scheduler.statistics()["done_commands"] == 3

    asyncio.run(run())


def test_a_lost_engine_is_reported_and_loses_no_command(tmp_path: Path) -> None:
    """Commands stay as they were, for the scheduler that comes next."""

    async def run() -> None:
        ledger = MemoryLedger()
        first = Bench(tmp_path, ledger)
        await first.open()
        await first.result(await first.create(LINE))
        await first.engine.close()
        lost = await first.forward_backward(LINE, 1)
        await until(lambda: ledger.board.report.problem is not None)
        is_ready = ledger.board.report.is_ready
        await first.close()
        async with bench(tmp_path, ledger) as second:
            done = await second.result(lost)

        assert not is_ready
        assert done.metrics["loss:sum"] > 0

    asyncio.run(run())


def test_a_queue_that_waits_long_reports_it(tmp_path: Path) -> None:
    """And no longer when its turn has come."""

    async def run() -> None:
        impatient = SchedulerSettings(told_after_s=0.0, most_batch_commands=1)
        async with bench(tmp_path, settings=impatient, fake=FakeSettings(batch_s=0.5)) as b:
            queues = [f"session-1:train:{n}" for n in range(5)]
            for queue_id in queues:
                await b.result(await b.create(queue_id))
            ids = [await b.forward_backward(queue_id, 1) for queue_id in queues]
            await until(lambda: any(b.ledger.board.queue_state(one).reason for one in queues))
            for request_id in ids:
                await b.result(request_id)
            await until(lambda: not any(b.ledger.board.queue_state(one).reason for one in queues))

    asyncio.run(run())


_NODES = [
    {"op": "placeholder", "name": "lp", "target": "logprobs"},
    {
        "op": "call_method",
        "name": "total",
        "target": "sum",
        "args": [{"ref": "lp"}],
    },
    {
        "op": "call_function",
        "name": "loss",
        "target": "operator.mul",
        "args": [{"ref": "total"}, -2.0],
    },
    {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": "loss"}, {"dict": {"custom/x:sum": {"ref": "total"}}}]}],
    },
]
TWICE: dict[str, Any] = {
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"format": 1, "nodes": _NODES},
}
"""A loss that is minus twice the sum of the log-probabilities."""


async def _add_loss(b: Bench, session: str, tenant: str = "tenant") -> str:
    loss_id = f"{session}:loss:0"
    await b.ledger.entries(CustomLossEntry).add(
        CustomLossEntry(
            id=loss_id,
            tenant_id=TenantId(tenant),
            created_at=0.0,
            session_id=SessionId(session),
            name="twice",
            graph=TWICE,
        )
    )
    return loss_id


@contextlib.asynccontextmanager
async def _tiny_model(folder: Path) -> AsyncIterator[Bench]:
    """A bench with the embedded engine, which runs uploaded losses."""
    make_model(folder / "model")
    model = EmbeddedModel(name=BASE, folder=folder / "model")
    made = Bench(folder, MemoryLedger())
    made.engine = EmbeddedEngine([model], EmbeddedSettings(threads=1, dtype="float32"))
    made.scheduler = Scheduler(made.ledger, made.engine, made.store, QUICK)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def test_an_uploaded_loss_runs_only_in_its_own_session(tmp_path: Path) -> None:
    """By its id; elsewhere there is no such loss."""

    async def run() -> None:
        async with _tiny_model(tmp_path) as b:
            loss_id = await _add_loss(b, "session-1")
            request = CreateCustomLossRequest.model_validate(
                {"session_id": "session-1", "custom_loss_seq_id": 0, "name": "twice", **TWICE}
            )
            made = await b.result(
                await b.submit("session-1:loss", 0, "create_custom_loss", request, is_ordered=False)
            )
            custom: dict[str, Any] = {"loss": "custom", "config": {"loss_id": made.loss_id}}
            await b.create(LINE)
            await b.create("session-2:train:0")
            plain_pass = await b.result(await b.forward_backward(LINE, 1))
            passed = await b.result(await b.forward_backward(LINE, 2, **custom))
            other = await b.result(await b.forward_backward("session-2:train:0", 1, **custom))

        assert made.loss_id == loss_id
        assert passed.metrics["loss:sum"] == pytest.approx(2 * plain_pass.metrics["loss:sum"])
        assert passed.metrics["custom/x:sum"] == pytest.approx(-plain_pass.metrics["loss:sum"])
        assert "no loss" in other.error

    asyncio.run(run())


class SlowLosses(FakeEngine):
    """Uploaded losses of the first session end when they are told to."""

    def __init__(self) -> None:
        super().__init__([fake_model(BASE)])
        self.goes_on = asyncio.Event()
        self.calls: list[list[str]] = []

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Of one batch; `calls` has what is in each."""
        self.calls.append([work.work_id for work in batch])
        is_slow = [work.adapter_id.startswith("session-1:") for work in batch]
        if has_uploaded_loss(batch) and any(is_slow):
            await self.goes_on.wait()
        return await super().train([_with_built_in_loss(work) for work in batch])


def _with_built_in_loss(work: TrainingWork) -> TrainingWork:
    """The fake engine runs no uploaded losses; what they compute is of no interest here."""
    if isinstance(work, StepWork):
        return work
    return msgspec.structs.replace(work, loss_fn="cross_entropy", custom_loss=None)


@contextlib.asynccontextmanager
async def _slow_losses(
    folder: Path, tenants: dict[str, str]
) -> AsyncIterator[tuple[Bench, SlowLosses]]:
    """A bench with a model for each line, whose tenants are given, and a loss in each session."""
    made = Bench(folder, MemoryLedger())
    engine = made.engine = SlowLosses()
    made.scheduler = Scheduler(made.ledger, engine, made.store, QUICK)
    await made.open()
    try:
        for queue_id, tenant in tenants.items():
            session = queue_id.partition(":")[0]
            await made.result(await made.create(queue_id, tenant=tenant))
            if queue_id.endswith(":0"):
                await _add_loss(made, session, tenant)
        yield made, engine
    finally:
        engine.goes_on.set()
        await made.close()


def _uploaded(queue_id: str) -> dict[str, Any]:
    return {"loss": "custom", "config": {"loss_id": f"{queue_id.partition(':')[0]}:loss:0"}}


async def _is_settled(b: Bench, request_id: str) -> bool:
    return (await b.ledger.command(request_id)).is_settled


def test_a_slow_uploaded_loss_does_not_delay_others(tmp_path: Path) -> None:
    """Others train meanwhile, with uploaded losses too, and the tenant its other models."""
    mine, my_second, other = "session-1:train:0", "session-1:train:1", "session-2:train:0"
    tenants = {mine: "slow", my_second: "slow", other: "other"}

    async def run() -> None:
        async with _slow_losses(tmp_path, tenants) as (b, engine):
            slow = await b.forward_backward(mine, 1, tenant="slow", **_uploaded(mine))
            behind = await b.step(mine, 2, tenant="slow")
            await until(lambda: [slow] in engine.calls)
            waiting = await b.forward_backward(my_second, 1, tenant="slow", **_uploaded(mine))

            for number in (1, 3, 5):
                loss = _uploaded(other) if number == 3 else {}
                passed = await b.forward_backward(other, number, tenant="other", **loss)
                stepped = await b.step(other, number + 1, tenant="other")
                assert (await b.result(passed)).metrics["loss:sum"] > 0
                assert (await b.result(stepped)).metrics
            for one in (slow, behind, waiting):
                assert not await _is_settled(b, one)

            engine.goes_on.set()
            for one in (slow, behind, waiting):
                assert (await b.result(one)).metrics
            assert b.scheduler.statistics()["held_commands"] == 0

    asyncio.run(run())


def test_queued_uploaded_losses_run_in_order(tmp_path: Path) -> None:
    """Those of a third and a fourth tenant after those of two, which hold all places."""
    queues = {f"session-1:train:{n}": f"tenant-{n}" for n in range(4)}

    async def run() -> None:
        async with _slow_losses(tmp_path, queues) as (b, engine):
            asked = [
                await b.forward_backward(queue_id, number, tenant=tenant, **_uploaded(queue_id))
                for queue_id, tenant in queues.items()
                for number in range(1, 9)
            ]
            await until(lambda: len(engine.calls) == 2)
            plain = "session-1:train:3"
            assert not any(await asyncio.gather(*(_is_settled(b, one) for one in asked)))
            engine.goes_on.set()
            for one in asked:
                assert (await b.result(one)).metrics["loss:sum"] > 0
            assert sorted(one for call in engine.calls for one in call) == sorted(asked)
            for queue_id in queues:
                own = [one for call in engine.calls for one in call if one.startswith(queue_id)]
                assert own == [one for one in asked if one.startswith(queue_id)]
            assert (await b.result(await b.forward_backward(plain, 9, tenant="tenant-3"))).metrics

    asyncio.run(run())


def test_a_loss_interrupted_by_shutdown_is_run_again(tmp_path: Path) -> None:
    """It was not settled, and nobody waits for it longer than for others."""
    queue_id = "session-1:train:0"

    async def run() -> None:
        async with _slow_losses(tmp_path, {queue_id: "tenant"}) as (b, engine):
            slow = await b.forward_backward(queue_id, 1, **_uploaded(queue_id))
            await until(lambda: [slow] in engine.calls)

            await b.scheduler.close(drain_s=0.0)

            assert not await _is_settled(b, slow)
            engine.goes_on.set()
            async with Scheduler(b.ledger, b.engine, b.store, QUICK):
                assert (await b.result(slow)).metrics["loss:sum"] > 0

    asyncio.run(run())


def test_readiness_reports_a_lost_engine_until_it_is_back(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
            await goes_on.wait()
            return await super().train(batch)

    goes_on = asyncio.Event()

    async def test() -> None:
        soon = SchedulerSettings(engine_silence_s=0.01)
        made = Bench(tmp_path, MemoryLedger())
        engine = made.engine = Slow([fake_model(BASE)])
        made.scheduler = Scheduler(made.ledger, engine, made.store, soon)
        await made.open()
        board = made.ledger.board
        await made.create("s:train:0")
        asked = await made.step("s:train:0", 1)

        await until(lambda: "training, 1 commands" in str(board.report.problem))

        assert not board.report.is_ready
        assert board.report.figures["engine_silence_s"] > 0
        goes_on.set()
        assert (await made.result(asked)).metrics["tinsmith/step"] == 1
        await until(lambda: board.report.is_ready)
        await made.close()

    asyncio.run(test())
