"""Logs the progress of training runs, one line every few seconds while a run trains.

The same is stored with each run, for listings.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec

from tinsmith.errors import LedgerError, UnknownEntryError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ModelEntry
from tinsmith.service.ledger.run_progress import RunProgress
from tinsmith.types.runs import short_run_id

_log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How often each run that trains is logged."""


class RunLog:
    """Logs and stores the progress of runs. For one event loop.

    Args:
        ledger: Where runs are stored.
        epoch: Gives the epoch that its writes are conditional on.
        clock: Seconds that only run forward.
    """

    def __init__(
        self,
        ledger: Ledger,
        epoch: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._epoch = epoch
        self._clock = clock
        self._looked_at = clock()

    async def look(self) -> None:
        """Log and store what has changed since the last call."""
        now = self._clock()
        elapsed_s, self._looked_at = max(now - self._looked_at, 1e-3), now
        is_unavailable = False  # then only the first run waits for the ledger
        for run_id, run in self._ledger.board.runs.take().items():
            model = None
            if not is_unavailable:
                try:
                    model = await self._kept(run_id, run)
                except LedgerError as exc:
                    _log.debug("could not store the progress of runs: %s", exc)
                    is_unavailable = True
            if run.begun:
                what = "a model" if model is None else model.base_model
                _log.info("run %s: began to train %s", short_run_id(run_id), what)
            if run.is_changed:
                rate = f"{run.tokens / elapsed_s:,.0f} tokens/s"
                _log.info("run %s: %s, %s", short_run_id(run_id), _state(run), rate)
            if run.ended is not None:
                _log.info(
                    "run %s: ended after %s; it %s", short_run_id(run_id), _state(run), run.ended
                )

    async def _kept(self, run_id: str, run: RunProgress) -> ModelEntry | None:
        def changed(model: ModelEntry) -> ModelEntry:
            if not run.is_changed:
                return model
            loss = run.loss_per_token if math.isfinite(run.loss_per_token) else None
            return msgspec.structs.replace(model, steps=run.steps, loss_per_token=loss)

        try:
            return await self._ledger.entries(ModelEntry, epoch=self._epoch()).change(
                run_id, changed
            )
        except UnknownEntryError:
            return None


def _state(run: RunProgress) -> str:
    state = f"step {run.steps}"
    if math.isfinite(run.loss_per_token):
        state += f", loss per token {run.loss_per_token:.4g}"
    return state
