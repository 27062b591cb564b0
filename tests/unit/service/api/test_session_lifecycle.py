"""Sessions end by their client's word or by its silence, once, and their models are released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.api.lookups import Lookups
from tinsmith.service.api.session_lifecycle import SessionLifecycle
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    Appended,
    Command,
    ModelEntry,
    SessionEntry,
    SessionId,
    Submission,
    TenantId,
)
from tinsmith.service.ledger.scheduler_lease import SteadyClock

TENANT = TenantId("t")
FINISHED = {"type": "client_finished", "reason": {"type": "success"}}
TIMEOUT_S = 100.0
LOOK_S = 10.0


class Scene:
    """A ledger whose time stands still unless it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.ledger = MemoryLedger(clock=SteadyClock(lambda: self.time, lambda: self.time))
        self.sessions = SessionLifecycle(self.ledger, Lookups(self.ledger), TIMEOUT_S)

    async def add(self, session_id: str, models: int = 0) -> SessionEntry:
        session = SessionEntry(
            id=session_id,
            tenant_id=TENANT,
            created_at=self.time,
            project_id="p",
            heartbeat_at=self.time,
        )
        await self.ledger.entries(SessionEntry).add(session)
        for number in range(models):
            model = ModelEntry(
                id=f"{session_id}:train:{number}",
                tenant_id=TENANT,
                created_at=self.time,
                session_id=SessionId(session_id),
                base_model="m",
            )
            await self.ledger.entries(ModelEntry).add(model)
        return session

    async def wait(self, seconds: float) -> int:
        """Let time pass with the looks that a service takes in it; how many sessions they ended."""
        ended, until = 0, self.time + seconds
        while self.time < until:
            self.time += min(LOOK_S, until - self.time)
            ended += await self.sessions.end_silent()
        return ended

    async def ending(self, session_id: str) -> str | None:
        found = await self.ledger.entries(SessionEntry).get(session_id)
        assert found is not None
        return None if found.ending is None else str(found.ending["type"])

    async def released(self) -> list[str]:
        commands: list[Command] = await self.ledger.claim("c", limit=1000)
        assert {command.kind for command in commands} <= {"release_model"}
        return [command.queue_id for command in commands]


def play(work: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a test in a scene."""

    async def main() -> None:
        await work(Scene())

    asyncio.run(main())


def test_a_session_without_heartbeats_is_ended_and_one_with_them_is_not() -> None:
    """Silence is counted from the last beat."""

    async def work(scene: Scene) -> None:
        await scene.add("silent", models=2)
        beating = await scene.add("beating", models=1)
        await scene.wait(90)
        await scene.sessions.beat(beating)

        assert await scene.wait(20) == 1

        assert await scene.ending("silent") == "cancelled"
        assert await scene.ending("beating") is None
        assert sorted(await scene.released()) == ["silent:train:0", "silent:train:1"]

    play(work)


def test_a_session_is_ended_once_and_keeps_the_first_reason() -> None:
    """A finish that comes twice, or after the end by silence, changes nothing."""

    async def work(scene: Scene) -> None:
        await scene.add("one", models=1)
        await scene.sessions.end("one", FINISHED)
        scene.time += 1
        await scene.sessions.end("one", {"type": "cancelled"})

        assert await scene.wait(1000) == 0
        assert await scene.ending("one") == "client_finished"
        assert await scene.released() == ["one:train:0"]

    play(work)


def test_a_heartbeat_after_the_end_does_not_revive_a_session() -> None:
    """The client is told that it has ended."""

    async def work(scene: Scene) -> None:
        session = await scene.add("one")
        await scene.sessions.end("one", FINISHED)

        beaten = await scene.sessions.beat(session)

        assert beaten.ended_at is not None

    play(work)


def test_server_downtime_does_not_expire_sessions() -> None:
    """After a restart every session has its whole time to beat again."""

    async def work(scene: Scene) -> None:
        await scene.add("one")
        scene.time += 10_000
        scene.sessions = SessionLifecycle(scene.ledger, Lookups(scene.ledger), TIMEOUT_S)

        assert await scene.wait(TIMEOUT_S) == 0
        assert await scene.wait(LOOK_S) == 1

    play(work)


def test_time_while_the_server_was_paused_does_not_expire_sessions() -> None:
    """Stopped by a signal or with its container, it finds their beats in its sockets later."""

    async def work(scene: Scene) -> None:
        await scene.add("one")
        await scene.wait(LOOK_S)
        scene.time += 10_000

        assert await scene.wait(TIMEOUT_S) == 0
        assert await scene.wait(2 * LOOK_S) == 1

    play(work)


@pytest.mark.parametrize("is_read", [True, False])
def test_time_while_heartbeats_could_not_be_recorded_does_not_expire_sessions(
    is_read: bool,
) -> None:
    """Of a full disk everything can be read; of a database that is away, nothing."""

    async def work(scene: Scene) -> None:
        session = await scene.add("one")
        entries = scene.ledger.entries(SessionEntry)

        async def fail(*_: object, **__: object) -> SessionEntry:
            raise LedgerUnavailableError("the disk is full, or the database is away")

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(type(entries), "change", fail)
            if not is_read:
                broken.setattr(type(entries), "due", fail)
            for _ in range(30):
                scene.time += LOOK_S
                with pytest.raises(LedgerUnavailableError):
                    await scene.sessions.beat(session)
                with contextlib.suppress(LedgerUnavailableError):
                    await scene.sessions.end_silent()

        assert await scene.wait(TIMEOUT_S) == 0
        assert await scene.wait(2 * LOOK_S) == 1

    play(work)


def test_more_sessions_than_a_page_holds_are_all_ended() -> None:
    """Also when all of them fell silent at the same moment."""

    async def work(scene: Scene) -> None:
        for number in range(1200):
            await scene.add(f"s{number}")

        assert await scene.wait(1000) == 1200

    play(work)


def test_a_heartbeat_during_the_expiry_check_counts() -> None:
    """The session is not ended on the word of a list that is out of date."""

    async def work(scene: Scene) -> None:
        session = await scene.add("one")
        scene.time += 1000
        await scene.sessions.beat(session)

        await scene.sessions.end("one", {"type": "cancelled"}, unless_heard_since=scene.time - 1)

        assert await scene.ending("one") is None

    play(work)


def test_a_session_end_interrupted_by_a_crash_is_completed_at_the_next_start() -> None:
    """The session had ended, and its models were not released; once is enough."""

    async def work(scene: Scene) -> None:
        session = await scene.add("one", models=2)
        await scene.add("open", models=1)
        ended = msgspec.structs.replace(session, ended_at=scene.time, ending=FINISHED)
        await scene.ledger.entries(SessionEntry).put(ended)

        assert await scene.sessions.finish_endings() == 2
        assert await scene.sessions.finish_endings() == 0

        assert sorted(await scene.released()) == ["one:train:0", "one:train:1"]

    play(work)


def test_an_interrupted_session_end_is_completed_when_requested_again() -> None:
    async def work(scene: Scene) -> None:
        await scene.add("s", models=3)
        append, tries = scene.ledger.append, 0

        async def append_the_first(submission: Submission) -> Appended:
            nonlocal tries
            tries += 1
            if tries == 2:
                raise LedgerUnavailableError("the disk is full")
            return await append(submission)

        scene.ledger.append = append_the_first  # type: ignore[method-assign]
        with pytest.raises(LedgerUnavailableError):
            await scene.sessions.end("s", FINISHED)

        await scene.sessions.end("s", FINISHED)
        await scene.sessions.end("s", FINISHED)

        assert sorted(await scene.released()) == [f"s:train:{number}" for number in range(3)]

    play(work)


def test_the_queue_of_an_unloaded_model_is_released_with_its_session() -> None:
    async def work(scene: Scene) -> None:
        await scene.add("s", models=2)
        await scene.ledger.entries(ModelEntry).change(
            "s:train:0", lambda kept: msgspec.structs.replace(kept, released_at=scene.time)
        )

        await scene.sessions.end("s", FINISHED)

        assert sorted(await scene.released()) == ["s:train:0", "s:train:1"]

    play(work)
