"""What a scheduler tells and nobody keeps: tokens as they come, why a line waits, how it is.

Everything else between server and scheduler goes through the ledger and is durable. What stands
here is for those who look while it happens, and is lost with the process: a server in another
process, over a shared database, sees none of it. Its clients get the final results, and `active` as
the queue's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from tinsmith.ledger.run_progress import RunBoard
from tinsmith.types.futures import QueueStateName

MOST_STREAMS = 4096
"""How many streams may be watched at a time."""


class QueueReport(msgspec.Struct, frozen=True):
    """Whether a line is being held back, and why."""

    state: QueueStateName = "active"
    reason: str | None = None
    retry_after_s: float | None = None


class SchedulerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler is."""

    is_ready: bool = False
    """Whether recovery is done and commands are being run."""
    problem: str | None = None
    """What keeps it from working."""
    figures: dict[str, float] = {}


class TokenPiece(msgspec.Struct, frozen=True):
    """Tokens of one sequence, as they were drawn."""

    sequence: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


ACTIVE = QueueReport()
NO_LEASE = "the scheduler's lease on the ledger was not renewed in time"


class Board:
    """See the top of the module. For one event loop."""

    def __init__(self) -> None:
        self.may_work: Callable[[], bool] = lambda: True
        """Whether the scheduler holds the ledger's lease; set by whoever keeps it."""
        self._scheduler = SchedulerReport()
        self.ledger_doubted = asyncio.Event()
        """Set by a server that found the ledger unavailable; the scheduler then looks."""
        self.store_problem: str | None = None
        """What is wrong with the store of checkpoints."""
        self.store_doubted = asyncio.Event()
        """Set by whoever found the store unavailable; the service then looks."""
        self.runs = RunBoard()
        self._everywhere = ACTIVE
        self._lines: dict[str, QueueReport] = {}
        self._streams: dict[str, _Stream] = {}
        self._waiting: dict[asyncio.Future[None], str] = {}

    # The scheduler

    @property
    def scheduler(self) -> SchedulerReport:
        """How the scheduler is: never ready while the lease is not held, whatever it said last."""
        if self._scheduler.is_ready and not self.may_work():
            return SchedulerReport(problem=NO_LEASE, figures=self._scheduler.figures)
        return self._scheduler

    @scheduler.setter
    def scheduler(self, report: SchedulerReport) -> None:
        self._scheduler = report

    @property
    def readiness(self) -> SchedulerReport:
        """How the service is: as its scheduler, unless the store of checkpoints is away."""
        if not self.scheduler.is_ready or self.store_problem is None:
            return self.scheduler
        return msgspec.structs.replace(self.scheduler, is_ready=False, problem=self.store_problem)

    # Queue states

    def hold(self, report: QueueReport, line: str | None = None) -> None:
        """Say that a line is held back, or all of them; `ACTIVE` takes it back."""
        if line is None:
            self._everywhere = report
        elif report.state == "active":
            self._lines.pop(line, None)
        else:
            self._lines[line] = report
        for waiting, waited_for in self._waiting.items():
            if line in (None, waited_for) and not waiting.done():
                waiting.set_result(None)

    def release_lines(self) -> None:
        """Take back what was said of single lines; a scheduler that begins knows of none."""
        for line in list(self._lines):
            self.hold(ACTIVE, line)

    async def wait_held(self, line: str, told: QueueReport) -> None:
        """Return when a line is held back for another reason than was told, at once if it is."""
        while (report := self.queue(line)).state == "active" or report == told:
            told = told if report == told else ACTIVE
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = line
            try:
                await waiting
            finally:
                del self._waiting[waiting]

    def queue(self, line: str) -> QueueReport:
        """What is said of a line."""
        return self._lines.get(line, self._everywhere)

    # Tokens

    def watch(self, request_id: str) -> bool:
        """Ask for the tokens of a command, before it is appended; False if too many are watched.

        Whoever watches must call `unwatch`.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            if len(self._streams) >= MOST_STREAMS:
                return False
            stream = self._streams[request_id] = _Stream()
        stream.watchers += 1
        return True

    def unwatch(self, request_id: str) -> None:
        """Let go of a stream."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.watchers -= 1
            if stream.watchers <= 0:
                del self._streams[request_id]

    def is_watched(self, request_id: str) -> bool:
        """Whether anybody wants this command's tokens as they come."""
        return request_id in self._streams

    def tell(self, request_id: str, pieces: Sequence[TokenPiece]) -> None:
        """Hand out tokens; nothing happens if nobody watches."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.pieces.extend(pieces)
            stream.changed.set()

    def restart(self, request_id: str) -> None:
        """Forget what was told: the command is run anew, and its tokens come again."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.pieces.clear()
            stream.restarts += 1
            stream.changed.set()

    def restarts(self, request_id: str) -> int:
        """How often a watched command was run anew."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.restarts

    async def wait_pieces(
        self, request_id: str, after: int, *, timeout_s: float
    ) -> list[TokenPiece]:
        """The pieces after the first `after`, as soon as there are any; none if the time is up."""
        stream = self._streams.get(request_id)
        if stream is None:
            return []
        if len(stream.pieces) <= after:
            stream.changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.changed.wait()
            except TimeoutError:
                return []
        return stream.pieces[after:]


class _Stream:
    """Tokens of one command that somebody watches."""

    def __init__(self) -> None:
        self.pieces: list[TokenPiece] = []
        self.changed = asyncio.Event()
        self.watchers = 0
        self.restarts = 0
