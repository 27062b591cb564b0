"""Work that was accepted: its request id, how it ended, and when it may be done.

A `Command` is opened when a submission is accepted and settled when its work has been done; the
work itself is given by `training.py` and `sampling.py`, and `polls.py` tells the end of it to
those who wait. The same submission twice, told by the identity that its endpoint names, is one
command; another body under the same identity is refused.

Faults strike here: work is held back, fails, or ends out of turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from tinsmith.errors import APIStatusError, BadRequestError, NotFoundError, TinkerError
from tinsmith.testing.completion_feed import CompletionFeed
from tinsmith.testing.faults import CommandFault, Faults
from tinsmith.testing.holds import Hold
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.futures import RequestFailedResponse, UntypedAPIFuture
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.endpoint_types import FutureResult
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import encode_body
from tinsmith.wire.failures import failed_from_error
from tinsmith.wire.protobuf import Parts

_log = logging.getLogger(__name__)

_GONE = 410

Identity = tuple[tuple[str, Any], ...]
Result = Record | Frozen
Work = Callable[[], Result]


class Command(msgspec.Struct, kw_only=True, eq=False):
    """One piece of accepted work."""

    request_id: str
    received: ReceivedRequest
    faults: list[CommandFault]
    settled: asyncio.Event
    model_id: str | None = None
    sequence_ids: list[str] | None = None
    feed: CompletionFeed | None = None
    """Where its end is announced, for a sample."""
    hold: Hold | None = None
    """What keeps it back now."""
    outcome: Result | None = None
    payload: Parts = []
    settled_at: float = 0.0
    is_gone: bool = False
    """Whether its result can no longer be read."""

    @property
    def result(self) -> FutureResult:
        """What it gives and in which format."""
        return FUTURE_RESULTS[ENDPOINTS[self.received.endpoint or ""].result or ""]

    @property
    def payload_bytes(self) -> int:
        """How large its result is."""
        return sum(map(len, self.payload))

    @property
    def is_failed(self) -> bool:
        """Whether it ended with an error."""
        return isinstance(self.outcome, RequestFailedResponse)

    def answer(self) -> UntypedAPIFuture:
        """What a submission is answered with, each time it is made."""
        return UntypedAPIFuture(
            request_id=self.request_id,
            model_id=self.model_id,
            sample_sequence_ids=self.sequence_ids,
        )

    def forget(self) -> None:
        """Let go of its result."""
        if self.settled.is_set():
            self.is_gone = True
            self.payload = []


class Commands:
    """All commands of the service."""

    def __init__(self, settings: ServiceSettings, faults: Faults) -> None:
        self._settings = settings
        self._faults = faults
        self._commands: dict[str, Command] = {}
        self._by_identity: dict[Identity, Command] = {}
        self._feeds: dict[tuple[str, int], CompletionFeed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, received: ReceivedRequest) -> Command | None:
        """The command that this submission repeats.

        Raises:
            BadRequestError: Its identity was used for something else.
        """
        identity = _identity(received)
        known = self._by_identity.get(identity) if identity is not None else None
        if known is not None and not _is_same(known.received, received):
            named = ", ".join(f"{name} {value}" for name, value in identity or ())
            raise BadRequestError(f"{named} was used for another request; numbers are used once")
        return known

    def open(
        self, received: ReceivedRequest, *, request_id: str | None = None, **fields: Any
    ) -> Command:
        """Accept new work."""
        faults = self._faults.of_command(received)
        command = Command(
            request_id=request_id or f"request-{len(self._commands)}",
            received=received,
            faults=faults,
            settled=asyncio.Event(),
            hold=next((fault.hold for fault in faults if fault.hold), None),
            **fields,
        )
        self._commands[command.request_id] = command
        identity = _identity(received)
        if identity is not None:
            self._by_identity[identity] = command
        return command

    def known(self, request_id: str) -> Command:
        """The command with this id; raises `NotFoundError`."""
        command = self._commands.get(request_id)
        if command is None:
            raise NotFoundError(f"there is no request {request_id!r}")
        return command

    def check_lifetime(self, command: Command) -> None:
        """Raise a 410 if the command's result is no longer kept."""
        lifetime_s = self._settings.result_lifetime_s
        if lifetime_s is not None and time.monotonic() > command.settled_at + lifetime_s:
            command.forget()
        if command.is_gone:
            raise APIStatusError(
                f"the result of {command.request_id} is no longer kept", status_code=_GONE
            )

    def forget(self, request_ids: list[str]) -> None:
        """Let go of results that their client has."""
        for request_id in request_ids:
            if request_id in self._commands:
                self._commands[request_id].forget()

    def feed(self, sampling_session_id: str, clone: int) -> CompletionFeed:
        """Where the ends of one sampler's and clone's samples are announced."""
        return self._feeds.setdefault((sampling_session_id, clone), CompletionFeed())

    async def run(self, command: Command, work: Work) -> None:
        """Do the work when nothing keeps it back, and settle the command with how it ended.

        Returns when the work is done. A command that is to end out of turn settles later, so that
        the next one of its model can run.
        """
        for fault in command.faults:
            if fault.hold is not None:
                command.hold = fault.hold
                await self._wait_released(command, fault.hold)
            await asyncio.sleep(fault.delay_s)
        command.hold = None
        outcome = self._done(command, work)
        if any(fault.reversal for fault in command.faults):
            self._start(self._settle_in_turn(command, outcome))
        else:
            self.settle(command, outcome)

    async def _wait_released(self, command: Command, hold: Hold) -> None:
        if command.feed is None or hold.queue_state == "active":
            await hold.wait_released()
            return
        command.feed.begin_pause(hold)
        try:
            await hold.wait_released()
        finally:
            command.feed.end_pause(hold)

    def run_soon(self, command: Command, work: Work) -> None:
        """Do the work now if nothing keeps it back, else when it may be done."""
        if command.faults:
            self._start(self.run(command, work))
        else:
            self.settle(command, self._done(command, work))

    def settle(self, command: Command, outcome: Result) -> None:
        """End a command; the first end stays."""
        if command.settled.is_set():
            return
        command.outcome = outcome
        if not command.is_failed:
            command.payload = encode_body(outcome, command.result.format)
        command.settled_at = time.monotonic()
        command.is_gone = any(fault.expires for fault in command.faults)
        command.settled.set()
        if command.feed is not None:
            size = command.payload_bytes if self._settings.poller_reports_sizes else None
            command.feed.announce(command.request_id, size, is_failed=command.is_failed)

    async def close(self) -> None:
        """Stop the work that is under way."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, command: Command, work: Work) -> Result:
        failure = next((fault.failure for fault in command.faults if fault.failure), None)
        if failure is not None:
            return failure
        try:
            return work()
        except TinkerError as exc:
            return failed_from_error(exc)
        except Exception as exc:  # noqa: BLE001 - one bad command must not end its model's line
            _log.exception("%s failed inside the test service", command.request_id)
            return failed_from_error(exc)

    async def _settle_in_turn(self, command: Command, outcome: Result) -> None:
        for fault in command.faults:
            if fault.reversal is not None:
                await fault.reversal.wait_turn()
        self.settle(command, outcome)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _identity(received: ReceivedRequest) -> Identity | None:
    """What makes two submissions the same; None where nothing does."""
    names = ENDPOINTS[received.endpoint or ""].identity
    values = {name: getattr(received.request, name, None) for name in names}
    if "model_id" in names and values.get("seq_id") == 0:
        values["seq_id"] = None  # left out; samples do count from 0
    identity = tuple((name, value) for name, value in values.items() if value is not None)
    is_numbered = any(name.endswith("seq_id") for name, _ in identity)
    return identity if is_numbered or names == ("model_id",) else None


def _is_same(first: ReceivedRequest, second: ReceivedRequest) -> bool:
    if first.endpoint != second.endpoint:
        return False
    one, other = first.request, second.request
    if first.endpoint == "save_weights_for_sampler":
        # A repeated ephemeral save asks for a new sampler each time, under the same seq_id.
        other = other.model_copy(update={"sampling_session_seq_id": one.sampling_session_seq_id})
    return bool(one == other)
