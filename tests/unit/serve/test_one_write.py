"""When the head of an answer is written: with the body, or at the loop's next turn."""

import asyncio
from collections.abc import Callable

from tinsmith.serve.one_write import LARGE_BYTES, OneWrite


class Connection:
    """What was written to it, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, piece: bytes) -> None:
        self.writes.append(piece)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def written(answer: Callable[[OneWrite], None]) -> tuple[list[bytes], list[bytes]]:
    """The writes while the answer is given, and after a turn of the loop."""

    async def run() -> tuple[list[bytes], list[bytes]]:
        connection = Connection()
        answer(OneWrite(connection, asyncio.get_running_loop()))
        at_once = list(connection.writes)
        await asyncio.sleep(0)
        return at_once, connection.writes

    return asyncio.run(run())


def test_a_body_that_follows_at_once_leaves_with_its_head() -> None:
    def answer(one: OneWrite) -> None:
        one.write(b"head ")
        one.write(b"body")
        one.write(b"more")

    assert written(answer) == ([b"head body", b"more"], [b"head body", b"more"])


def test_a_head_without_a_body_leaves_at_the_next_turn() -> None:
    assert written(lambda one: one.write(b"head")) == ([], [b"head"])


def test_a_large_body_is_not_copied() -> None:
    body = b"x" * (LARGE_BYTES + 1)

    def answer(one: OneWrite) -> None:
        one.write(b"head")
        one.write(body)

    at_once, _ = written(answer)
    assert at_once[0] == b"head" and at_once[1] is body


def test_a_head_leaves_before_the_connection_is_closed_and_not_after() -> None:
    def closed_by_us(one: OneWrite) -> None:
        one.write(b"head")
        one.close()
        assert one.is_closing()

    def closed_by_others(one: OneWrite) -> None:
        one.write(b"head")
        one._transport.close()

    assert written(closed_by_us) == ([b"head"], [b"head"])
    assert written(closed_by_others) == ([], [])
