"""One model's line: order, gaps, refused numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tinsmith.errors import BadRequestError
from tinsmith.testing.command_order import CommandLine, Work


class Ran:
    """Notes which commands ran."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._more = asyncio.Condition()

    def command(self, number: int) -> Work:
        async def work() -> None:
            async with self._more:
                self.numbers.append(number)
                self._more.notify_all()

        return work

    async def wait(self, count: int) -> list[int]:
        async with asyncio.timeout(60), self._more:
            await self._more.wait_for(lambda: len(self.numbers) >= count)
        return self.numbers


def in_line(
    story: Callable[[CommandLine, Ran], Awaitable[None]], *, gap_wait_s: float = 60.0
) -> None:
    async def tell() -> None:
        line = CommandLine(gap_wait_s)
        await story(line, Ran())
        await line.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(tell())


def test_commands_run_by_number() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        for number in (3, 1, 2, 0):
            line.add(line.place(number) if number else 0, ran.command(number))

        assert await ran.wait(4) == [0, 1, 2, 3]

    in_line(story)


def test_nothing_runs_before_the_model_is_made() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(1, ran.command(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert ran.numbers == []
        line.add(0, ran.command(0))

        assert await ran.wait(2) == [0, 1]

    in_line(story)


def test_refused_numbers_count_as_done_before_and_after_others_wait_for_them() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(0, ran.command(0))
        line.spend(1)
        line.add(4, ran.command(4))
        line.add(2, ran.command(2))
        line.spend(3)

        assert await ran.wait(3) == [0, 2, 4]

    in_line(story)


def test_refused_number_may_be_sent_again() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.spend(1)
        line.add(line.place(1), ran.command(1))
        line.add(0, ran.command(0))

        assert await ran.wait(2) == [0, 1]

    in_line(story)


def test_missing_numbers_are_passed_over_and_refused_afterwards() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(0, ran.command(0))
        line.add(3, ran.command(3))
        line.add(7, ran.command(7))
        assert await ran.wait(3) == [0, 3, 7]

        with pytest.raises(BadRequestError, match="seq_id 5"):
            line.place(5)
        line.spend(5)  # harmless
        line.add(line.place(8), ran.command(8))
        assert await ran.wait(4) == [0, 3, 7, 8]

    in_line(story, gap_wait_s=0.01)


def test_late_number_within_the_wait_still_runs_first() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(0, ran.command(0))
        line.add(2, ran.command(2))
        await ran.wait(1)
        line.add(1, ran.command(1))

        assert await ran.wait(3) == [0, 1, 2]

    in_line(story)


def test_command_without_a_number_comes_after_all_others() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(0, ran.command(0))
        for number in (None, 0, None):
            place = line.place(number)
            line.add(place, ran.command(place))

        assert await ran.wait(4) == [0, 1, 2, 3]

    in_line(story)


def test_number_that_waits_is_not_free() -> None:
    async def story(line: CommandLine, ran: Ran) -> None:
        line.add(2, ran.command(2))

        with pytest.raises(BadRequestError, match="not free"):
            line.place(2)

    in_line(story)
