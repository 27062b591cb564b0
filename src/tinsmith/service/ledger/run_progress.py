"""The progress of training runs: steps, the last loss per token, and tokens trained on.

The scheduler notes it in memory. `run/run_log.py` reads it every few seconds, logs it, and stores
steps and loss with the run, for listings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tinsmith.observe.training_metrics import STEP


class RunProgress(msgspec.Struct):
    """The progress of one run since this service loaded it."""

    begun: bool = False
    """Whether it was created or loaded since the last `take`."""
    steps: int = 0
    """Since the run began, including those before a restart where the engine reports them."""
    loss_per_token: float = math.nan
    tokens: int = 0
    """Trained on since the last `take`."""
    is_changed: bool = False
    ended: str | None = None
    """Why the run ended, if it has."""


class RunProgressTable:
    """The progress of all loaded runs. For one event loop."""

    def __init__(self) -> None:
        self._runs: dict[str, RunProgress] = {}

    def begin(self, run_id: str) -> None:
        """Note that a run was created, or continues from a checkpoint."""
        self._of(run_id).begun = True

    def note_pass(self, run_id: str, loss_per_token: float, tokens: int) -> None:
        """Note a forward/backward pass and its loss, which is NaN if unknown."""
        run = self._of(run_id)
        if math.isfinite(loss_per_token):
            run.loss_per_token = loss_per_token
        run.tokens += tokens
        run.is_changed = True

    def note_step(self, run_id: str, metrics: Mapping[str, float] | None) -> None:
        """Note an optimizer step."""
        run = self._of(run_id)
        # The engine's own count continues after a resume.
        run.steps = int((metrics or {}).get(STEP, run.steps + 1))
        run.is_changed = True

    def end(self, run_id: str, why: str) -> None:
        """Note that a run is unloaded."""
        self._of(run_id).ended = why

    def take(self) -> dict[str, RunProgress]:
        """What has changed since this was last called, with the tokens since then."""
        runs = self._runs
        # Runs that continue keep their steps and loss.
        self._runs = {
            run_id: RunProgress(steps=run.steps, loss_per_token=run.loss_per_token)
            for run_id, run in runs.items()
            if run.ended is None
        }
        return {
            run_id: run
            for run_id, run in runs.items()
            if run.is_changed or run.begun or run.ended is not None
        }

    def _of(self, run_id: str) -> RunProgress:
        return self._runs.setdefault(run_id, RunProgress())
