"""The queue of a model's calls: order, seq_ids, and calls that give up."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith import types as t
from tinsmith.client.dispatch import DispatchQueue, Ticket, datum_bytes, split
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.wire.proto_format import encode_forward_backward_request


async def leave_with_seq_ids(ticket: Ticket, count: int, sent: list[int], wait: int = 0) -> None:
    async with ticket.first() as queue:
        seq_ids = queue.take_seq_ids(count)
        for _ in range(wait):
            await asyncio.sleep(0)
        sent.extend(seq_ids)


def test_s14_calls_are_sent_in_ticket_order_whichever_starts_first() -> None:
    sent: list[int] = []

    async def scenario() -> list[int]:
        queue = DispatchQueue()
        tickets = [queue.take_ticket() for _ in range(5)]
        order: list[int] = []

        async def call(ticket: Ticket) -> None:
            async with ticket.first():
                order.append(ticket.position)

        await asyncio.gather(*(call(ticket) for ticket in reversed(tickets)))
        return order

    sent = asyncio.run(scenario())

    assert sent == [0, 1, 2, 3, 4]


def test_s14_seq_ids_start_at_1_and_increase_by_1_across_multi_chunk_calls() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        queue = DispatchQueue()
        sizes = [1, 4, 1, 3, 2]
        tickets = [queue.take_ticket() for _ in sizes]
        await asyncio.gather(
            *(
                leave_with_seq_ids(ticket, size, sent, wait=size)
                for ticket, size in zip(tickets, sizes, strict=True)
            )
        )

    asyncio.run(scenario())

    assert sent == list(range(1, 12))


def test_s17_a_call_cancelled_in_the_queue_leaves_no_gap_and_delays_nobody() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        queue = DispatchQueue()
        first, cancelled, last = queue.take_tickets(3)
        blocked = asyncio.Event()

        async def slow_first() -> None:
            async with first.first() as turn:
                sent.extend(turn.take_seq_ids(1))
                await blocked.wait()

        tasks = [
            asyncio.create_task(slow_first()),
            asyncio.create_task(leave_with_seq_ids(cancelled, 2, sent)),
            asyncio.create_task(leave_with_seq_ids(last, 1, sent)),
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        blocked.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    asyncio.run(scenario())

    assert sent == [1, 2]


def test_s17_a_call_that_never_started_can_give_up_its_ticket() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        queue = DispatchQueue()
        never, last = queue.take_tickets(2)
        task = asyncio.create_task(leave_with_seq_ids(last, 1, sent))
        await asyncio.sleep(0)
        never.leave()
        never.leave()
        await asyncio.wait_for(task, timeout=60)

    asyncio.run(scenario())

    assert sent == [1]


def test_s17_a_call_cancelled_as_it_reaches_the_head_of_the_queue_delays_nobody() -> None:
    sent: list[int] = []

    async def scenario() -> int:
        queue = DispatchQueue()
        first, cancelled, last = queue.take_tickets(3)
        tasks = [
            asyncio.create_task(leave_with_seq_ids(cancelled, 1, sent)),
            asyncio.create_task(leave_with_seq_ids(last, 1, sent)),
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()
        first.leave()  # the one whose turn it is now has not noticed yet that it is cancelled
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
        return len(queue._waiting)

    assert asyncio.run(scenario()) == 0
    assert sent == [1]


def test_leaving_twice_is_counted_once_in_the_queue_length() -> None:
    queue = DispatchQueue()
    tickets = queue.take_tickets(4)

    tickets[2].leave()
    assert queue.length == 3
    tickets[0].leave()
    tickets[0].leave()
    assert queue.length == 2
    for ticket in tickets:
        ticket.leave()
        ticket.leave()
    assert queue.length == 0


def test_s17_a_call_that_fails_unblocks_the_next_one() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        queue = DispatchQueue()
        failing, last = queue.take_tickets(2)

        async def fail() -> None:
            async with failing.first():
                raise ConnectionError

        results = await asyncio.gather(
            fail(), leave_with_seq_ids(last, 1, sent), return_exceptions=True
        )
        assert isinstance(results[0], ConnectionError)

    asyncio.run(scenario())

    assert sent == [1]


def test_s14_a_held_ticket_blocks_those_behind_it() -> None:
    async def scenario() -> list[str]:
        queue = DispatchQueue()
        trace: list[str] = []
        forward, backward, step = queue.take_tickets(3)
        loss_is_ready = asyncio.Event()

        async def custom_loss() -> None:
            async with forward.first():
                trace.append("forward")
            await loss_is_ready.wait()
            async with backward.first():
                trace.append("backward")

        async def optim_step() -> None:
            async with step.first():
                trace.append("step")

        tasks = [asyncio.create_task(optim_step()), asyncio.create_task(custom_loss())]
        for _ in range(5):
            await asyncio.sleep(0)
        loss_is_ready.set()
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
        return trace

    assert asyncio.run(scenario()) == ["forward", "backward", "step"]


@pytest.mark.usefixtures("eager_switching")
def test_s14_tickets_of_many_threads_are_unique_and_ordered_per_thread() -> None:
    queue = DispatchQueue()
    taken: list[list[int]] = [[] for _ in range(8)]

    def take(mine: list[int]) -> None:
        for _ in range(200):
            mine.extend(ticket.position for ticket in queue.take_tickets(3))

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(ticket for mine in taken for ticket in mine) == list(range(8 * 200 * 3))
    assert all(mine == sorted(mine) for mine in taken)


def test_the_queue_length_counts_tickets_that_have_not_left() -> None:
    async def scenario() -> list[int]:
        queue = DispatchQueue()
        tickets = queue.take_tickets(3)
        lengths = [queue.length]
        for ticket in tickets:
            async with ticket.first():
                pass
            lengths.append(queue.length)
        return lengths

    assert asyncio.run(scenario()) == [3, 2, 1, 0]


MAX_BYTES = 5_000_000
MAX_DATUMS = 1024


def a_datum(token_count: int) -> t.Datum:
    """A datum of 4 bytes for each token."""
    return t.Datum(t.ModelInput.from_ints(np.zeros(token_count, dtype="int32")))


def sizes(chunks: list[list[t.Datum]]) -> list[int]:
    return [len(chunk) for chunk in chunks]


def test_64_long_datums_make_8_chunks() -> None:
    """As in the official SDK: seven chunks of nine, and one of what is left."""
    tokens = np.zeros(32_768, dtype="int32")
    inputs = {
        "target_tokens": np.zeros(32_768, dtype="int64"),
        "weights": np.ones(32_768, dtype="float32"),
    }
    data = [t.Datum(t.ModelInput.from_ints(tokens), inputs) for _ in range(64)]

    chunks = split(data, max_datums=MAX_DATUMS, max_bytes=MAX_BYTES)

    assert sizes(chunks) == [9] * 7 + [1]


def test_no_data_is_split_into_no_chunks() -> None:
    assert split([], max_datums=MAX_DATUMS, max_bytes=MAX_BYTES) == []


def test_a_large_datum_gets_its_own_chunk() -> None:
    small, large = a_datum(1), a_datum(1_000)

    chunks = split([large, small, small, large, large, small], max_datums=10, max_bytes=100)

    assert sizes(chunks) == [1, 2, 1, 1, 1]
    assert chunks[0] == chunks[2] == [large]


def test_a_chunk_is_full_when_the_limits_are_reached_exactly() -> None:
    data = [a_datum(25)] * 4  # 100 bytes each

    assert sizes(split(data, max_datums=10, max_bytes=200)) == [2, 2]
    assert sizes(split(data, max_datums=10, max_bytes=199)) == [1, 1, 1, 1]
    assert sizes(split(data, max_datums=3, max_bytes=1_000)) == [3, 1]
    assert sizes(split(data, max_datums=4, max_bytes=400)) == [4]


def test_empty_datums_are_counted_by_number() -> None:
    data = [t.Datum(t.ModelInput.empty())] * 5

    assert sizes(split(data, max_datums=2, max_bytes=0)) == [2, 2, 1]


@given(
    st.lists(st.integers(0, 40), max_size=30),
    st.integers(1, 6),
    st.integers(-1, 120),
)
def test_chunks_are_never_empty_and_keep_order_and_limits(
    token_counts: list[int], max_datums: int, max_bytes: int
) -> None:
    data = [a_datum(count) for count in token_counts]

    chunks = split(data, max_datums=max_datums, max_bytes=max_bytes)

    assert [datum for chunk in chunks for datum in chunk] == data
    assert all(chunks)
    assert max(sizes(chunks), default=0) <= max_datums
    for chunk in chunks:
        assert len(chunk) == 1 or sum(map(datum_bytes, chunk)) <= max_bytes
    for chunk, following in itertools.pairwise(chunks):
        longer = sum(map(datum_bytes, [*chunk, following[0]]))
        assert len(chunk) == max_datums or longer > max_bytes  # none is closed early


@pytest.mark.parametrize(
    ("datum", "size"),
    [
        (a_datum(3), 12),
        (t.Datum(t.ModelInput([t.ImageChunk(data=b"12345", format="png")])), 5),
        (t.Datum(t.ModelInput([t.DmelChunk(dmel=b"123")])), 3),
        (t.Datum(t.ModelInput([t.ImageAssetPointerChunk(location="s3://x", format="png")])), 6),
        (t.Datum(t.ModelInput.empty(), {"weights": [1.0, 2.0]}), 8),
        (t.Datum(t.ModelInput.empty(), {"target_tokens": [1, 2]}), 16),
        # Ten values, eleven row starts and ten columns.
        (t.Datum(t.ModelInput.empty(), {"weights": torch.eye(10)}), 40 + 88 + 80),
    ],
)
def test_the_size_of_a_datum_is_estimated_as_the_api_does(datum: t.Datum, size: int) -> None:
    assert datum_bytes(datum) == size


def test_the_estimate_is_close_to_the_encoded_size() -> None:
    datum = t.Datum(
        t.ModelInput.from_ints(range(10_000)),
        {"target_tokens": np.arange(10_000), "weights": np.ones(10_000)},
    )
    request = ForwardBackwardRequest(t.ForwardBackwardInput([datum], "cross_entropy"), "m", 1)

    sent = sum(map(len, encode_forward_backward_request(request)))

    assert datum_bytes(datum) <= sent <= datum_bytes(datum) + 200
