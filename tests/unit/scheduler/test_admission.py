"""Samples that wait to be admitted."""

from __future__ import annotations

from tests.unit.scheduler.made import a_command
from tinsmith.ledger.records import Command, RequestId
from tinsmith.scheduler.admission import SampleQueue


def _sample(number: int, tenant: str = "t", payload_bytes: int = 100) -> Command:
    return a_command(
        f"{tenant}:s", number, kind="asample", tenant=tenant, payload_bytes=payload_bytes
    )


def test_a_tenants_samples_are_taken_in_the_order_of_their_arrival() -> None:
    """Whatever their numbers."""
    queue = SampleQueue()
    for number in (5, 3, 4):
        queue.add(_sample(number))

    assert [one.seq_id for one in queue.take(2)] == [5, 3]
    assert [one.seq_id for one in queue.take(2)] == [4]
    assert queue.take(2) == []


def test_a_tenants_one_sample_is_among_the_first() -> None:
    """Not behind another's thousand."""
    queue = SampleQueue()
    for number in range(1000):
        queue.add(_sample(number, "many"))
    queue.add(_sample(0, "one"))

    assert "one" in {one.tenant_id for one in queue.take(2)}


def test_tenants_share_by_size() -> None:
    """Who asks with long prompts gets fewer of them in."""
    queue = SampleQueue()
    for number in range(300):
        queue.add(_sample(number, "long", payload_bytes=100_000))
        queue.add(_sample(number, "short", payload_bytes=100))
    taken = [one.tenant_id for one in queue.take(100)]

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
    assert (len(queue), queue.take(5)) == (0, [])
