"""The scheduler: claims commands, keeps each model's order, makes batches, settles.

    intake.py      claims, puts into lines, drops what was cancelled, minds gaps
    training.py    the engine's batches
    singles.py     commands that run by themselves: creations, loads, saves
    sampling.py    samples: admission, steps
    settling.py    outcomes into the ledger, in order
    snapshots.py   what keeps a replay short

Each is a loop of its own and waits for events, so that none holds up another; the event loop never
waits for the engine. Server and scheduler meet only in the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engines.base import Engine
from tinsmith.errors import LeaseLostError, LedgerError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.board import ACTIVE, QueueReport, SchedulerReport
from tinsmith.ledger.fenced import FencedLedger
from tinsmith.ledger.lease import Lease
from tinsmith.ledger.records import LineId
from tinsmith.observe.spans import Spans
from tinsmith.scheduler.fairness import EngineTurns
from tinsmith.scheduler.intake import Intake
from tinsmith.scheduler.model_commands import ModelCommands
from tinsmith.scheduler.order import TRAINING
from tinsmith.scheduler.parts import Parts
from tinsmith.scheduler.patience import PatientLedger
from tinsmith.scheduler.recovering import Recovering
from tinsmith.scheduler.sampling import Sampling
from tinsmith.scheduler.settings import SchedulerSettings
from tinsmith.scheduler.settling import Settler
from tinsmith.scheduler.silence import Silence
from tinsmith.scheduler.singles import Singles
from tinsmith.scheduler.snapshots import Snapshots
from tinsmith.scheduler.suspects import Suspects
from tinsmith.scheduler.training import Training

_log = logging.getLogger(__name__)

BUSY = "the engine is at work for others; its turn comes"
BUSY_AGAIN = "the engine first does what the last end of the service broke off; its turn comes"
REPORT_S = 1.0
"""How often the figures on the board are brought up to date."""


class Scheduler:
    """Runs what the ledger holds on one engine. For one event loop.

    The ledger, the engine and the store are open before and are closed by their owner after.

    All that it writes is conditional on the lease. Without one nothing is: for a scheduler that has
    its ledger to itself, as in tests.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        store: CheckpointStore,
        settings: SchedulerSettings | None = None,
        spans: Spans | None = None,
        suspects: Suspects | None = None,
        lease: Lease | None = None,
    ) -> None:
        settings = settings or SchedulerSettings()
        patient = PatientLedger(ledger.board)
        fenced = FencedLedger(ledger, None if lease is None else lease.epoch)
        self._parts = Parts(
            ledger=fenced,
            engine=engine,
            store=store,
            settings=settings,
            patient=patient,
            settler=Settler(fenced, patient, most_unsettled=settings.most_unsettled),
            turns=EngineTurns(is_shared=not engine.samples_apart),
            silence=Silence(settings.engine_silence_s),
            spans=spans or Spans(),
            suspects=suspects or Suspects(),
        )
        self._snapshots = Snapshots(self._parts)
        self._training = Training(self._parts, self._snapshots)
        self._commands = ModelCommands(self._parts, self._snapshots)
        self._singles = Singles(self._parts, self._snapshots, self._commands)
        self._sampling = Sampling(self._parts)
        self._intake = Intake(self._parts, self._sampling)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_ready = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Recover, then begin to work in the background. The board says when it is ready.

        Raises:
            ClosedError: The engine was lost meanwhile; `close` this one, and open another.
        """
        self._parts.ledger.board.release_lines()
        self._parts.suspects.clear()
        self._report()
        self._start("settling", self._parts.settler.run())
        self._start("reporting", self._keep_reporting())  # a recovery that waits has to be told of
        self._start("doubts", self._mind_doubts())
        try:
            await Recovering(self._parts, self._commands, self._training).run()
            self._parts.ledger.board.hold(ACTIVE)
        except Exception as exc:
            self._parts.problem = f"recovery has failed: {type(exc).__name__}: {exc}"
            self._report()
            raise
        self._is_ready = True
        loops = {
            "claiming": self._intake.claim(),
            "gaps": self._intake.mind_gaps(),
            "training": self._training.run(),
            "singles": self._singles.run(),
            "admission": self._sampling.admit(),
            "sampling": self._sampling.step(),
        }
        for name, loop in loops.items():
            self._start(name, loop)
        self._report()

    async def close(self, drain_s: float = 10.0) -> None:
        """Claim no more, finish what runs within `drain_s`, take snapshots, give the rest back.

        Samples are given up: they are drawn again, with the same seeds, by whoever comes next. May
        be called again.
        """
        parts = self._parts
        if parts.is_closing:
            return
        parts.is_closing = True
        self._is_ready = False
        self._report()
        parts.wake()
        await self._sampling.stop()
        parts.suspects.clear()  # whoever waits to enter the engine sees that nothing more does
        ends_at = time.monotonic() + drain_s
        await self._drain(ends_at)
        parts.suspects.clear()  # nor may who was late be taken for one that the engine still has
        # Out of order nothing may be settled any more, and nothing is: all who do have ended.
        await self._stop("settling")
        if not parts.ledger.board.may_work():
            return  # whoever has the lease next gives back the claims of all before
        try:
            await parts.ledger.release_claims(parts.settings.claimer)
        except LedgerError as exc:
            _log.warning("claims are given back at the next start: %s", exc)

    async def _drain(self, ends_at: float) -> None:
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + max(0.0, ends_at - time.monotonic())
            ):
                await self._stop("claiming", "gaps", "admission", "sampling", "singles")
                if "training" in self._tasks:
                    await asyncio.gather(self._tasks["training"], return_exceptions=True)
                await self._singles.wait()
                await self._snapshots.take_all()
                await self._parts.settler.wait_settled()
        except TimeoutError:
            _log.warning("what still runs is given up; it will be run again after the next start")
        await self._stop("training", "reporting", "doubts")
        await self._singles.stop()
        await self._snapshots.stop()
        await self._intake.stop()

    def statistics(self) -> dict[str, float]:
        """Figures for metrics, by name; names ending in `_s` are seconds."""
        parts = self._parts
        capacity = parts.engine.capacity()
        used_s = parts.turns.used_s
        return {
            **parts.statistics.counts(),
            "held_commands": float(parts.held),
            "queued_commands": float(len(parts.order)),
            "queued_samples": float(len(parts.samples)),
            "samples_under_way": float(self._sampling.under_way),
            "lines": float(parts.order.lines()),
            "gapped_lines": float(len(parts.order.gaps())),
            "unsettled": float(parts.settler.unsettled),
            "ledger_outages": float(parts.patient.outages),
            "engine_silence_s": parts.silence.longest_s(),
            "adapters": float(capacity.adapters),
            "most_adapters": float(capacity.most_adapters),
            "training_s": used_s["training"],
            "sampling_s": used_s["sampling"],
        }

    # Loops

    def _start(self, name: str, loop: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(loop, name=f"scheduler {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        """A loop that ends by itself leaves the service without it: say so."""
        if task.cancelled() or self._parts.is_closing:
            return
        error = task.exception()
        if isinstance(error, LeaseLostError):  # whoever keeps the lease will see it too
            _log.warning("the scheduler stops: %s", error)
            self._parts.problem = str(error)
            self._report()
            return
        _log.error("the scheduler's loop of %s has ended", name, exc_info=error)
        self._parts.problem = f"the scheduler's loop of {name} has ended: {type(error).__name__}"
        self._report()

    async def _stop(self, *names: str) -> None:
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_reporting(self) -> None:
        told: set[LineId] = set()
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()
            if self._parts.is_recovered:
                told = self._tell_waits(told)
                self._snapshots.consider_idle()
            else:
                self._tell_recovery()

    async def _mind_doubts(self) -> None:
        """When the server cannot write a command: be troubled too, until one could be written."""
        parts, doubted = self._parts, self._parts.ledger.board.ledger_doubted
        while True:
            await doubted.wait()
            doubted.clear()
            await parts.ask(parts.ledger.check_writable)

    def _tell_recovery(self) -> None:
        """Say that everything waits for models to be back, if it has for long."""
        parts = self._parts
        if parts.recovery and parts.ledger.now() - parts.began_at > parts.settings.told_after_s:
            parts.ledger.board.hold(QueueReport("paused_capacity", parts.recovery))

    def _tell_waits(self, told: set[LineId]) -> set[LineId]:
        """Say of lines that have waited for long that they wait for their turn."""
        parts, board = self._parts, self._parts.ledger.board
        before = parts.ledger.now() - parts.settings.told_after_s
        waiting = parts.samples.waiting_since(before)
        for line in parts.order.ready():
            head = parts.order.head(line)
            if head.created_at < before and head.kind in TRAINING:
                waiting.add(line)
        for line in told - waiting:
            board.hold(ACTIVE, line)
        reason = BUSY_AGAIN if self._training.is_running_again() else BUSY
        for line in waiting:
            board.hold(QueueReport("paused_capacity", reason), line)
        return waiting

    def _report(self) -> None:
        parts = self._parts
        problem = (
            parts.problem
            or parts.patient.problem
            or parts.silence.problem()
            or (None if parts.is_recovered else parts.recovery)
        )
        parts.ledger.board.scheduler = SchedulerReport(
            is_ready=self._is_ready and problem is None,
            problem=problem,
            figures=self.statistics(),
        )
