"""The board: what the scheduler publishes while it works, and nobody keeps.

Everything that must survive goes through the ledger. The board is for those who look while it
happens, and an implementation may lose all of it at any time:

| what | published by | read by | if it is stale or missing |
|---|---|---|---|
| the scheduler's report | the scheduler, every second | `/readyz`, metrics | not ready |
| why a queue is paused | the scheduler | long polls | clients see `active` |
| tokens of streamed samples | the scheduler | streams | streams send the final result |
| doubts about ledger or store | whoever met an error | scheduler, store check | found a bit later |
| the store's problem | the store check | `/readyz` | saves report it themselves |
| the progress of runs | the scheduler | the log of runs, same process | nothing in listings |

`MemoryBoard` serves one process, with nothing stale. `PostgresBoard` carries what is published to
all servers of a database, within about a second; it may drop tokens if it drops the rest of that
run's tokens too. Publishing never blocks and never fails: what needs I/O is done in the background.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import msgspec

from tinsmith.service.ledger.run_progress import RunProgressTable
from tinsmith.types.futures import QueueStateName


class QueueReport(msgspec.Struct, frozen=True):
    """Whether a queue is paused, and why."""

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


class Board(abc.ABC):
    """What every board offers. For one event loop.

    Attributes:
        may_work: Whether this process holds the scheduler's lease; set by whoever keeps the lease.
        epoch: The epoch of that lease, or of the last one that it held; 0 if it never held one.
        store_problem: What is wrong with the checkpoint store, as of its last check.
        runs: The progress of runs, for the process that runs the scheduler.
    """

    def __init__(self) -> None:
        self.may_work: Callable[[], bool] = lambda: True
        self.epoch = 0
        self.store_problem: str | None = None
        self.runs = RunProgressTable()

    def follow(self) -> None:  # noqa: B027 - nothing to do in one process
        """Ask for what others have published before; for a server that starts."""

    async def flush(self) -> None:  # noqa: B027 - nothing to do in one process
        """Return when what was published until now is on its way; gives up after a moment."""

    # The scheduler's report

    @abc.abstractmethod
    def publish_report(self, report: SchedulerReport) -> None:
        """Replace the scheduler's report."""

    @property
    @abc.abstractmethod
    def published_report(self) -> SchedulerReport:
        """The report that was published last."""

    @property
    def report(self) -> SchedulerReport:
        """How the scheduler is: never ready while the lease is not held, whatever it said last."""
        report = self.published_report
        if report.is_ready and not self.may_work():
            return SchedulerReport(problem=NO_LEASE, figures=report.figures)
        return report

    @property
    def readiness(self) -> SchedulerReport:
        """How the service is: as its scheduler, unless the checkpoint store is unavailable."""
        report = self.report
        if not report.is_ready or self.store_problem is None:
            return report
        return msgspec.structs.replace(report, is_ready=False, problem=self.store_problem)

    # Doubts

    @abc.abstractmethod
    def doubt_ledger(self) -> None:
        """Have the scheduler check the ledger: a write to it has failed."""

    @abc.abstractmethod
    async def wait_ledger_doubt(self) -> None:
        """Return when the ledger was doubted since the last call."""

    @abc.abstractmethod
    def doubt_store(self) -> None:
        """Have the checkpoint store checked: a call of it has failed."""

    @abc.abstractmethod
    async def wait_store_doubt(self, *, timeout_s: float) -> bool:
        """Whether the store was doubted since the last call; waits at most `timeout_s` for it."""

    # Queue states

    @abc.abstractmethod
    def set_queue_state(self, report: QueueReport, queue_id: str | None = None) -> None:
        """Publish why a queue is paused, or all of them; `ACTIVE` takes that back."""

    @abc.abstractmethod
    def clear_queue_states(self) -> None:
        """Take back what was published of single queues; for a scheduler that starts."""

    @abc.abstractmethod
    def queue_state(self, queue_id: str) -> QueueReport:
        """The state of a queue: its own, or that of all."""

    @abc.abstractmethod
    async def wait_paused(self, queue_id: str, known: QueueReport) -> None:
        """Return when a queue is paused for another reason than `known`; at once if it is."""

    # Tokens

    @abc.abstractmethod
    def watch(self, request_id: str) -> bool:
        """Ask for the tokens of a command, before it is appended; False if too many are watched.

        Each `watch` that returned True needs an `unwatch`.
        """

    @abc.abstractmethod
    def unwatch(self, request_id: str) -> None:
        """Stop watching."""

    @abc.abstractmethod
    def is_watched(self, request_id: str) -> bool:
        """Whether anybody wants this command's tokens as they are drawn."""

    @abc.abstractmethod
    def publish_tokens(self, request_id: str, pieces: Sequence[TokenPiece]) -> None:
        """Hand out tokens; does nothing if nobody watches."""

    @abc.abstractmethod
    def restart_tokens(self, request_id: str) -> None:
        """Discard what was handed out: the command runs again from its start."""

    @abc.abstractmethod
    def restarts(self, request_id: str) -> int:
        """How often a watched command was started again."""

    @abc.abstractmethod
    async def wait_tokens(
        self, request_id: str, after: int, *, timeout_s: float
    ) -> list[TokenPiece]:
        """The pieces after the first `after`, once there are any; empty when the time is up."""
