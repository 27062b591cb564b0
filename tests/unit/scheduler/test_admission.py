"""Samples that wait to be admitted."""

from __future__ import annotations

from collections import Counter

from tests.unit.scheduler.made import a_command
from tinsmith.ledger.records import Command, RequestId, TenantId
from tinsmith.scheduler.admission import SampleQueue


def _sample(number: int, tenant: str = "t", payload_bytes: int = 100) -> Command:
    return a_command(
        f"{tenant}:s", number, kind="asample", tenant=tenant, payload_bytes=payload_bytes
    )


def _take(queue: SampleQueue, most: int, slots: int = 10_000, **held: int) -> list[Command]:
    by_tenant = Counter({TenantId(tenant): samples for tenant, samples in held.items()})
    return queue.take(most, slots=slots, held=by_tenant)


def test_a_tenants_samples_are_taken_in_the_order_of_their_arrival() -> None:
    """Whatever their numbers."""
    queue = SampleQueue()
    for number in (5, 3, 4):
        queue.add(_sample(number))

    assert [one.seq_id for one in _take(queue, 2)] == [5, 3]
    assert [one.seq_id for one in _take(queue, 2)] == [4]
    assert _take(queue, 2) == []


def test_a_tenants_one_sample_is_among_the_first() -> None:
    """Not behind another's thousand."""
    queue = SampleQueue()
    for number in range(1000):
        queue.add(_sample(number, "many"))
    queue.add(_sample(0, "one"))

    assert "one" in {one.tenant_id for one in _take(queue, 2)}


def test_tenants_share_by_size() -> None:
    """Who asks with long prompts gets fewer of them in."""
    queue = SampleQueue()
    for number in range(300):
        queue.add(_sample(number, "long", payload_bytes=100_000))
        queue.add(_sample(number, "short", payload_bytes=100))
    taken = [one.tenant_id for one in _take(queue, 100)]

    assert 1 <= taken.count("long") <= 5  # type: ignore[arg-type]  # a tenant's id is text


def test_a_sample_waits_once_and_can_be_dropped() -> None:
    """Dropping it again says that it is not there."""
    queue = SampleQueue()
    queue.add(_sample(1))
    queue.add(_sample(1))
    before = len(queue)

    assert before == 1
    assert queue.drop(RequestId("t:s:1"))
    assert not queue.drop(RequestId("t:s:1"))
    assert (len(queue), _take(queue, 5)) == (0, [])


def test_a_tenant_that_comes_finds_a_slot_however_many_another_asks_for() -> None:
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


def test_tenants_that_ask_for_much_end_up_with_equal_slots() -> None:
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
