"""What the service says of training runs while they are at work: one line now and then.

The same is kept with each run, where listings find it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec

from tinsmith.errors import LedgerError, UnknownEntryError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import Model
from tinsmith.ledger.run_progress import RunProgress
from tinsmith.types.runs import short_run_id

_log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How often each run that is at work has a line."""


class RunLog:
    """Tells how far runs are. For one event loop.

    Args:
        ledger: Where runs are kept.
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
        """Say and keep what has changed since the last look."""
        now = self._clock()
        elapsed_s, self._looked_at = max(now - self._looked_at, 1e-3), now
        is_away = False  # then only the first one waits for the ledger
        for run_id, run in self._ledger.board.runs.take().items():
            model = None
            if not is_away:
                try:
                    model = await self._kept(run_id, run)
                except LedgerError as exc:
                    _log.debug("the progress of runs could not be kept: %s", exc)
                    is_away = True
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

    async def _kept(self, run_id: str, run: RunProgress) -> Model | None:
        def changed(model: Model) -> Model:
            if not run.is_changed:
                return model
            loss = run.loss_per_token if math.isfinite(run.loss_per_token) else None
            return msgspec.structs.replace(model, steps=run.steps, loss_per_token=loss)

        try:
            return await self._ledger.entries(Model, epoch=self._epoch()).change(run_id, changed)
        except UnknownEntryError:
            return None


def _state(run: RunProgress) -> str:
    state = f"step {run.steps}"
    if math.isfinite(run.loss_per_token):
        state += f", loss per token {run.loss_per_token:.4g}"
    return state
