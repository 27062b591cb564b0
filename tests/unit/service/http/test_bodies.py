"""Bodies are read within bounds, and packed for those who can unpack them."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from tinsmith.errors import (
    APIStatusError,
    BadRequestError,
    BodyTooLargeError,
    RateLimitError,
    TinkerError,
)
from tinsmith.service.http.bodies import BodyBudget, BodyLimits, BudgetedBody
from tinsmith.service.http.edge import compressed
from tinsmith.wire.content import decompress
from tinsmith.wire.exchange import HttpReply


class Pieces:
    """A client that sends some pieces, and then nothing, or leaves."""

    def __init__(self, *pieces: bytes, ends: bool = True, leaves: bool = False) -> None:
        last = len(pieces) - 1
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": not (ends and number == last)}
            for number, piece in enumerate(pieces)
        ]
        if leaves:
            self._messages.append({"type": "http.disconnect"})

    async def __call__(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def read(pieces: Pieces, headers: dict[str, str], **settings: Any) -> bytes:
    """The body as the server has it."""
    reader = BudgetedBody(BodyBudget(BodyLimits(**settings)))
    body = asyncio.run(reader.read(pieces, headers))
    assert body is not None
    return bytes(body)


CHUNKED = {"transfer-encoding": "chunked"}


def test_a_body_is_read_in_one_piece_or_many() -> None:
    """Announced or not."""
    assert read(Pieces(b"abc"), {"content-length": "3"}) == b"abc"
    assert read(Pieces(b"a", b"", b"bc"), CHUNKED) == b"abc"
    assert read(Pieces(b""), {}) == b""


@pytest.mark.parametrize(
    ("pieces", "headers", "error"),
    [
        (Pieces(), {"content-length": "11"}, BodyTooLargeError),
        (Pieces(b"123456", b"123456"), CHUNKED, BodyTooLargeError),
        (Pieces(b"12345678901"), CHUNKED, BodyTooLargeError),
        (Pieces(), {"content-length": "-1"}, BadRequestError),
        (Pieces(), {"content-length": "1" * 40}, BadRequestError),
        (Pieces(), {"content-length": "²"}, BadRequestError),
    ],
)
def test_oversized_bodies_and_invalid_lengths_are_rejected(
    pieces: Pieces, headers: dict[str, str], error: type[TinkerError]
) -> None:
    """Before more than the limit is held."""
    with pytest.raises(error):
        read(pieces, headers, body_bytes=10)


def test_a_body_that_stalls_or_arrives_too_slowly_times_out() -> None:
    """The refusal says the rate."""
    with pytest.raises(APIStatusError, match=r"0 bytes in 0\.01 s") as silent:
        read(Pieces(ends=False), CHUNKED, upload_window_s=0.01)
    with pytest.raises(APIStatusError, match="at least 1000 bytes/s") as slow:
        read(Pieces(b"a" * 9, ends=False), CHUNKED, upload_window_s=0.01, upload_bytes_per_s=1000)

    assert (silent.value.status_code, slow.value.status_code) == (408, 408)


def test_a_body_that_keeps_the_minimum_rate_may_take_any_time() -> None:
    """Each window begins anew with what is due in one."""

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        left.pop()
        return {"type": "http.request", "body": b"a" * 1000, "more_body": bool(left)}

    left = list(range(60))
    settings = BodyLimits(upload_window_s=1.0, upload_bytes_per_s=1000)
    body = asyncio.run(BudgetedBody(BodyBudget(settings)).read(receive, CHUNKED))

    assert body is not None
    assert len(body) == 60_000


def test_a_client_that_disconnects_midway_is_not_answered() -> None:
    """There is nobody to answer."""
    body = BudgetedBody(BodyBudget(BodyLimits()))

    assert asyncio.run(body.read(Pieces(b"a", ends=False, leaves=True), CHUNKED)) is None


def test_all_bodies_together_are_bounded() -> None:
    """One more than fits is asked to come back; when the first is done with there is room."""

    async def work() -> None:
        budget = BodyBudget(BodyLimits(bodies_bytes=10, small_body_bytes=0))
        first = BudgetedBody(budget)
        slow = asyncio.create_task(first.read(Pieces(b"12345678", ends=False), CHUNKED))
        await asyncio.sleep(0)
        with pytest.raises(RateLimitError) as refused:
            await BudgetedBody(budget).read(Pieces(b"abc"), {"content-length": "3"})
        assert refused.value.retry_after_s is not None
        with pytest.raises(RateLimitError):
            await BudgetedBody(budget).read(Pieces(b"abc"), CHUNKED)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        first.release()
        assert await BudgetedBody(budget).read(Pieces(b"abc"), {"content-length": "3"}) == b"abc"

    asyncio.run(work())


def test_only_received_bytes_count_against_the_budget() -> None:
    """Only what has arrived does."""

    async def work() -> None:
        budget = BodyBudget(BodyLimits(bodies_bytes=10, small_body_bytes=0))
        announced = BudgetedBody(budget).read(Pieces(b"1", ends=False), {"content-length": "10"})
        slow = asyncio.create_task(announced)
        await asyncio.sleep(0)
        assert budget.held_bytes == 1
        assert await BudgetedBody(budget).read(Pieces(b"abc"), {"content-length": "3"}) == b"abc"
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (("alice", "a"), ("alice", "b"), "tenant"),
        (("alice", "a"), ("bob", "a"), "address"),
        (("alice", "a"), ("bob", "b"), "total"),
    ],
)
def test_tenants_and_addresses_have_their_own_budgets(
    first: tuple[str, str], second: tuple[str, str], reason: str
) -> None:
    """And a small body is read whatever the large ones take."""
    budget = BodyBudget(
        BodyLimits(
            tenant_bodies_bytes=10, address_bodies_bytes=20, bodies_bytes=30, small_body_bytes=3
        )
    )
    size = {"tenant": 10, "address": 20, "total": 23}[reason]
    held = [BudgetedBody(budget, first[1]), BudgetedBody(budget, second[1])]
    held[0].tenant_id, held[1].tenant_id = first[0], second[0]
    held[0].hold(size)

    with pytest.raises(RateLimitError):
        held[1].hold(4)
    assert budget.refused == {reason: 1}
    held[1].hold(3)
    held[0].release()
    held[1].hold(4)
    held[1].release()

    assert budget.held_bytes == 0
    assert not budget._held_by


def test_a_tenant_may_use_at_most_half_of_the_free_budget() -> None:
    """So that tenants that fill the budget together leave room for the next one."""
    budget = BodyBudget(BodyLimits(bodies_bytes=1000, small_body_bytes=0))
    taken = []
    for name in ("alice", "bob", "carol"):
        taken.append(0)
        with pytest.raises(RateLimitError):  # noqa: PT012 - as much as there is
            while True:
                held = BudgetedBody(budget, name)
                held.tenant_id = name
                held.hold(10)
                taken[-1] += 10

    assert taken == [500, 250, 120]


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate, zstd", "zstd"),
        ("gzip", "gzip"),
        ("zstd;q=0, gzip;q=0.5", "gzip"),
        ("", None),
        ("br", None),
        ("identity", None),
    ],
)
def test_large_responses_are_compressed_as_the_client_accepts(
    accepted: str, encoding: str | None
) -> None:
    """And can be unpacked again."""
    body = b'{"a": 1}' * 1000
    reply = HttpReply(200, {"Content-Type": "application/json"}, [body[:10], body[10:]])

    sent = asyncio.run(compressed(reply, accepted, 100))

    assert sent.headers.get("Content-Encoding") == encoding
    whole = b"".join(sent.parts)
    assert bytes(decompress(whole, encoding)) == body
    assert encoding is None or int(sent.headers["Content-Length"]) == len(whole) < len(body)


@pytest.mark.parametrize(
    "reply",
    [
        HttpReply(200, {"Content-Type": "application/json"}, [b"small"]),
        HttpReply(206, {"Content-Type": "application/json"}, [b"x" * 5000]),
        HttpReply(200, {"Content-Type": "application/octet-stream"}, [b"x" * 5000]),
        HttpReply(
            200,
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            [gzip.compress(b"x" * 500_000)],
        ),
    ],
)
def test_other_responses_are_not_compressed(reply: HttpReply) -> None:
    """Small ones, parts, files, and what is packed already."""
    assert asyncio.run(compressed(reply, "zstd", 100)) is reply


# Bodies that are read as they arrive


async def read_pieces(
    receive: Any, headers: dict[str, str], most_bytes: int, **settings: Any
) -> list[Any]:
    body = BudgetedBody(BodyBudget(BodyLimits(**settings)))
    return [piece async for piece in body.pieces(receive, headers, most_bytes)]


def test_a_streamed_body_is_bounded_by_its_own_limit_and_takes_no_budget() -> None:
    budget = BodyBudget(BodyLimits(body_bytes=2, small_body_bytes=0))
    body = BudgetedBody(budget)

    async def read() -> list[Any]:
        found = []
        async for piece in body.pieces(Pieces(b"abc", b"de"), CHUNKED, 5):
            found.append(piece)
            assert budget.held_bytes == 0
        return found

    assert asyncio.run(read()) == [b"abc", b"de"]


def test_a_streamed_body_that_is_too_large_is_refused_announced_or_not() -> None:
    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_pieces(Pieces(b"abc", b"def"), CHUNKED, 5))
    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_pieces(Pieces(b""), {"content-length": "6"}, 5))
    with pytest.raises(BadRequestError):
        asyncio.run(read_pieces(Pieces(b""), {"content-length": "x"}, 5))


def test_a_streamed_body_that_stops_arriving_is_refused() -> None:
    with pytest.raises(APIStatusError) as refused:
        asyncio.run(read_pieces(Pieces(b"abc", ends=False), CHUNKED, 5, upload_window_s=0.05))

    assert refused.value.status_code == 408
