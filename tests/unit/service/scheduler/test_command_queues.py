"""Each model's line of commands, and which of them may run next."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.service.scheduler.made import a_command
from tinsmith.service.ledger.records import Command, QueueId, RequestId, TenantId
from tinsmith.service.scheduler.command_queues import (
    PASSES,
    CommandQueues,
    EngineArbiter,
    Kind,
    SampleQueue,
    SequenceGap,
    TenantShares,
)

M, N = QueueId("m"), QueueId("n")


def _order(*queues: QueueId) -> CommandQueues:
    order = CommandQueues()
    for queue_id in queues or (M,):
        order.begin(queue_id, 0)
    return order


def test_second_command_waits_for_the_first() -> None:
    """A model's next command may run once the one before it has ended."""
    first, second = a_command(number=0), a_command(number=1)
    order = _order()
    order.add(second, 0.0)
    before = order.ready()
    order.add(first, 0.0)

    assert before == []
    assert order.head(M) == first
    order.start(M)
    assert order.ready() == []
    order.finish(M, [first], 0.0)
    assert order.head(M) == second


def test_nothing_of_a_held_queue_starts_until_it_is_released() -> None:
    """What runs is waited for; commands that arrive meanwhile wait too."""

    async def test() -> None:
        order = _order()
        order.add(a_command(number=0), 0.0)
        order.start(M)
        order.hold(M)
        waiting = asyncio.create_task(order.wait_idle(M))
        await asyncio.sleep(0)
        was_waiting = not waiting.done()
        order.finish(M, (), 0.0)
        order.add(a_command(number=1), 0.0)
        await waiting

        assert was_waiting
        assert order.ready() == [] and order.gaps() == []
        order.release(M, 0.0)
        assert order.ready() == [M]
        await order.wait_idle(M)

    asyncio.run(test())


def test_queues_do_not_wait_for_each_other() -> None:
    """What one waits for does not hold up another."""
    order = _order(M, N)
    order.add(a_command("m", 1), 0.0)
    order.add(a_command("n", 0), 0.0)

    assert order.ready() == [N]


@given(st.permutations(range(12)))
def test_commands_run_in_seq_id_order_whatever_order_they_arrive_in(numbers: list[int]) -> None:
    """Each is ready exactly when all before it have ended."""
    order = _order()
    for number in numbers:
        assert order.add(a_command(number=number), 0.0)

    ran = []
    while order.ready():
        head = order.head(M)
        order.start(M)
        order.finish(M, [head], 0.0)
        ran.append(head.seq_id)

    assert ran == list(range(12))
    assert len(order) == 0


def test_a_gap_is_reported_with_its_start_time() -> None:
    """From the moment when something waits for it."""
    order = _order()
    order.add(a_command(number=3), 5.0)
    order.add(a_command(number=2), 6.0)

    assert order.gaps() == [SequenceGap(M, 0, 2, 5.0)]


def test_an_empty_or_busy_queue_has_no_gap() -> None:
    """Nothing waits for the missing number, or not yet."""
    order = _order()
    empty = order.gaps()
    order.add(a_command(number=0), 0.0)
    order.add(a_command(number=2), 0.0)
    order.start(M)
    busy = order.gaps()
    order.finish(M, [a_command(number=0)], 9.0)

    assert empty == busy == []
    assert order.gaps() == [SequenceGap(M, 1, 2, 9.0)]


def test_a_queue_skips_a_gap_on_request() -> None:
    """And what comes late is refused; a line never goes back."""
    order = _order()
    order.add(a_command(number=2), 0.0)
    order.skip_to(M, 2, 1.0)
    order.skip_to(M, 1, 1.0)

    assert order.gaps() == []
    assert order.head(M).seq_id == order.position(M) == 2
    assert not order.add(a_command(number=1), 1.0)


def test_a_command_is_queued_once() -> None:
    """The same number again is refused."""
    order = _order()

    assert order.add(a_command(number=0), 0.0)
    assert not order.add(a_command(number=0), 0.0)
    assert len(order) == 1


def test_a_dropped_command_counts_as_done() -> None:
    """The next one is not held up by it, whether it was the head or behind it."""
    order = _order()
    for number in range(4):
        order.add(a_command(number=number), 0.0)

    assert order.drop(M, 2, 0.0)
    assert order.drop(M, 0, 0.0)
    assert not order.drop(M, 9, 0.0)
    assert order.head(M).seq_id == 1
    order.start(M)
    order.finish(M, [a_command(number=1)], 0.0)
    assert order.head(M).seq_id == 3


def test_a_running_command_is_not_dropped() -> None:
    """It is too late for that."""
    order = _order()
    order.add(a_command(number=0), 0.0)
    order.start(M)

    assert not order.drop(M, 0, 0.0)


def test_a_queue_resumes_at_its_recorded_position() -> None:
    """What ended before, also out of order, is not waited for."""
    order = CommandQueues()
    order.begin(M, 3, done=[1, 3, 4, 7])
    order.add(a_command(number=5), 0.0)

    assert order.head(M).seq_id == 5
    assert not order.add(a_command(number=7), 0.0)


def test_a_run_of_commands_ends_at_another_kind_and_at_a_gap() -> None:
    """Only commands that follow each other may share a call."""
    order = _order(M, N)
    for number, kind in enumerate(["forward_backward", "forward", "optim_step", "forward"]):
        order.add(a_command(number=number, kind=kind), 0.0)
    for number in (0, 2):
        order.add(a_command("n", number), 0.0)

    assert [one.seq_id for one in order.run_of(M, PASSES)] == [0, 1]
    assert [one.seq_id for one in order.run_of(N, PASSES)] == [0]


def test_a_removed_queue_leaves_nothing_behind() -> None:
    """Neither waiting commands nor gaps."""
    order = _order(M, N)
    order.add(a_command("m", 1), 0.0)
    order.add(a_command("n", 0), 0.0)
    order.forget(M)
    order.forget(N)
    order.finish(N, [a_command("n", 0)], 0.0)

    assert (len(order), order.count(), order.ready(), order.gaps()) == (0, 0, [], [])


def test_a_running_queue_is_not_skipped_ahead_and_has_no_gap() -> None:
    """Such as a snapshot of it: what is missing may come meanwhile."""
    order = _order()
    order.start(M)
    order.add(a_command(number=2), 1.0)

    order.skip_to(M, 2, 2.0)

    assert order.position(M) == 0
    assert order.gaps() == []
    order.finish(M, [], 3.0)
    assert order.gaps() == [SequenceGap(M, 0, 2, 3.0)]


def _is_set(queues: CommandQueues) -> tuple[bool, bool, bool]:
    """Which events are set; clears them."""
    events = (queues.training_ready, queues.other_ready, queues.gap_found)
    found = (events[0].is_set(), events[1].is_set(), events[2].is_set())
    for event in events:
        event.clear()
    return found


def test_each_loop_is_woken_only_for_its_own_work() -> None:
    queues = CommandQueues()
    for name in ("a", "b"):
        queues.begin(QueueId(name), 0)

    queues.add(a_command("a", 0), 0.0)
    training = _is_set(queues)
    queues.add(a_command("a", 1, kind="save_weights"), 0.0)
    behind = _is_set(queues)
    queues.start(QueueId("a"))
    queues.finish(QueueId("a"), [a_command("a", 0)], 0.0)
    other = _is_set(queues)
    queues.add(a_command("b", 3), 0.0)
    gap = _is_set(queues)

    assert training == (True, False, False)
    assert behind == (True, False, False)  # the head is what may run
    assert other == (False, True, False)
    assert gap == (False, False, True)


A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_a_new_tenant_is_next() -> None:
    """However much another has been given before."""
    shares = TenantShares()
    for _ in range(100):
        shares.charge(shares.next([A]), 10)

    assert shares.next([A, B]) == B


def test_idle_time_earns_no_extra_share() -> None:
    """Who comes back has its share from then on, and no more."""
    shares = TenantShares()
    shares.charge(shares.next([A, B]), 1)
    for _ in range(1000):
        shares.charge(shares.next([A]), 1)
    given = Counter[TenantId]()
    for _ in range(100):
        tenant = shares.next([A, B])
        shares.charge(tenant, 1)
        given[tenant] += 1

    assert abs(given[A] - given[B]) <= 2


@given(st.lists(st.integers(1, 50), min_size=3, max_size=3))
def test_shares_are_equal_whatever_the_size_of_the_commands(sizes: list[int]) -> None:
    """By amount, not by count: to within the largest commands."""
    shares, given = TenantShares(), Counter[TenantId]()
    size_of = dict(zip((A, B, C), sizes, strict=True))
    for _ in range(600):
        tenant = shares.next(size_of)
        shares.charge(tenant, size_of[tenant])
        given[tenant] += size_of[tenant]

    assert max(given.values()) - min(given.values()) <= 2 * max(sizes)


def test_training_and_sampling_have_equal_time() -> None:
    """Though a batch takes fifty times as long as a step of the sampler."""
    costs: dict[Kind, float] = {"training": 1.0, "sampling": 0.02}
    now, ran = 0.0, Counter[Kind]()

    async def run() -> dict[Kind, float]:
        engine = EngineArbiter(clock=lambda: now)

        async def work(kind: Kind) -> None:
            nonlocal now
            await engine.set_active(kind, True)
            while sum(ran.values()) < 520:
                async with engine.reserve(kind):
                    now += costs[kind]
                    ran[kind] += 1
                await asyncio.sleep(0)  # as settling does, with the turn given back
            await engine.set_active(kind, False)

        await asyncio.gather(work("training"), work("sampling"))
        return engine.used_s

    used_s = asyncio.run(run())

    assert 30 <= ran["sampling"] / ran["training"] <= 60
    assert abs(used_s["training"] - used_s["sampling"]) <= 2.1


def test_a_single_kind_of_work_does_not_wait() -> None:
    """An idle kind is not waited for, and its idleness is not saved up."""

    async def run() -> None:
        now = 0.0
        engine = EngineArbiter(clock=lambda: now)
        await engine.set_active("training", True)
        for _ in range(10):
            async with asyncio.timeout(60), engine.reserve("training"):
                now += 1.0
        await engine.set_active("sampling", True)

        assert engine.used_s["sampling"] == engine.used_s["training"] == 10.0

    asyncio.run(run())


def test_an_engine_that_trains_and_samples_concurrently_is_not_time_shared() -> None:
    """Nobody waits for a turn there."""

    async def run() -> None:
        engine = EngineArbiter(is_shared=False)
        await engine.set_active("training", True)
        await engine.set_active("sampling", True)
        async with asyncio.timeout(60), engine.reserve("training"), engine.reserve("sampling"):
            pass

    asyncio.run(run())


def test_a_reservation_is_released_when_its_block_fails() -> None:
    """The next one has it."""

    async def run() -> None:
        engine = EngineArbiter()
        with pytest.raises(RuntimeError):
            async with engine.reserve("training"):
                raise RuntimeError
        async with asyncio.timeout(60), engine.reserve("sampling"):
            pass

    asyncio.run(run())


def test_time_used_while_alone_is_not_owed_to_the_other_kind() -> None:
    now = 0.0

    async def run() -> int:
        nonlocal now
        turns = EngineArbiter(clock=lambda: now)
        await turns.set_active("training", True)
        async with turns.reserve("training"):
            now += 1000.0
        await turns.set_active("training", False)
        await turns.set_active("sampling", True)
        await turns.set_active("training", True)
        training = asyncio.create_task(_trained(turns))
        steps = 0
        while not training.done() and steps < 100:
            async with turns.reserve("sampling"):
                now += 0.01
            steps += 1
            await asyncio.sleep(0)
        await training
        return steps

    assert asyncio.run(run()) < 10


async def _trained(turns: EngineArbiter) -> None:
    async with turns.reserve("training"):
        pass


def _sample(number: int, tenant: str = "t", payload_bytes: int = 100) -> Command:
    return a_command(
        f"{tenant}:s", number, kind="asample", tenant=tenant, payload_bytes=payload_bytes
    )


def _take(queue: SampleQueue, most: int, slots: int = 10_000, **held: int) -> list[Command]:
    by_tenant = Counter({TenantId(tenant): samples for tenant, samples in held.items()})
    return queue.take(most, slots=slots, held=by_tenant)


def test_samples_of_a_tenant_are_taken_in_arrival_order() -> None:
    """Whatever their numbers."""
    queue = SampleQueue()
    for number in (5, 3, 4):
        queue.add(_sample(number))

    assert [one.seq_id for one in _take(queue, 2)] == [5, 3]
    assert [one.seq_id for one in _take(queue, 2)] == [4]
    assert _take(queue, 2) == []


def test_a_tenant_s_single_sample_is_among_the_first() -> None:
    """Not behind another's thousand."""
    queue = SampleQueue()
    for number in range(1000):
        queue.add(_sample(number, "many"))
    queue.add(_sample(0, "one"))

    assert "one" in {one.tenant_id for one in _take(queue, 2)}


def test_tenants_share_by_prompt_size() -> None:
    """Who asks with long prompts gets fewer of them in."""
    queue = SampleQueue()
    for number in range(300):
        queue.add(_sample(number, "long", payload_bytes=100_000))
        queue.add(_sample(number, "short", payload_bytes=100))
    taken = [one.tenant_id for one in _take(queue, 100)]

    assert 1 <= taken.count("long") <= 5  # type: ignore[arg-type]  # a tenant's id is text


def test_a_sample_is_queued_once_and_can_be_dropped() -> None:
    """Dropping it again says that it is not there."""
    queue = SampleQueue()
    queue.add(_sample(1))
    queue.add(_sample(1))
    before = len(queue)

    assert before == 1
    assert queue.drop(RequestId("t:s:1"))
    assert not queue.drop(RequestId("t:s:1"))
    assert (len(queue), _take(queue, 5)) == (0, [])


def test_a_new_tenant_gets_a_slot_however_many_another_requests() -> None:
    """In engines of any size; the only slot of an engine goes to whoever is first."""
    for slots in (2, 3, 9, 40, 1024):
        queue = SampleQueue()
        for number in range(2000):
            queue.add(_sample(number, "many"))
        held = len(_take(queue, 2000, slots))
        queue.add(_sample(0, "one"))

        assert held >= slots * 3 // 4 if slots > 3 else held == slots - 1
        assert [one.tenant_id for one in _take(queue, 2000, slots, many=held)] == ["one"]
    queue.add(_sample(1, "many"))
    assert len(_take(queue, 5, slots=1)) == 1


def test_busy_tenants_end_up_with_equal_slots() -> None:
    """The one that came first gets none anew until the other has caught up."""
    queue = SampleQueue()
    for number in range(2000):
        queue.add(_sample(number, "first"))
        queue.add(_sample(number, "second"))
    held = Counter({TenantId("first"): 900})
    for _ in range(2000):
        for command in queue.take(5, slots=1000, held=held):
            held[command.tenant_id] += 1
        largest = max(held, key=held.__getitem__)
        held[largest] -= 1  # one of its samples ends

    assert abs(held[TenantId("first")] - held[TenantId("second")]) <= 20
