"""How far training runs are: steps, the last loss per token, and tokens trained on.

A scheduler notes it as it goes, in memory. Whoever runs the service reads it now and then, says it
in the log, and keeps the steps and the loss with the run, where listings find them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tinsmith.observe.training_metrics import STEP


class RunProgress(msgspec.Struct):
    """One run, since this service has had it."""

    begun: bool = False
    """Whether it was made or loaded now, and nobody has been told."""
    steps: int = 0
    """Since the run began, also before a restart where the engine says so."""
    loss_per_token: float = math.nan
    tokens: int = 0
    """Trained on since the last look."""
    is_changed: bool = False
    ended: str | None = None
    """Why it has ended, if it has."""


class RunBoard:
    """The progress of all runs that were at work since the last look. For one event loop."""

    def __init__(self) -> None:
        self._runs: dict[str, RunProgress] = {}

    def begin(self, run_id: str) -> None:
        """Note that a run was made, or goes on from a checkpoint."""
        self._of(run_id).begun = True

    def note_pass(self, run_id: str, loss_per_token: float, tokens: int) -> None:
        """Note a pass with gradients, and its loss, which is NaN where it is not known."""
        run = self._of(run_id)
        if math.isfinite(loss_per_token):
            run.loss_per_token = loss_per_token
        run.tokens += tokens
        run.is_changed = True

    def note_step(self, run_id: str, metrics: Mapping[str, float] | None) -> None:
        """Note a step of the optimizer."""
        run = self._of(run_id)
        # What the engine says counts on after a resume.
        run.steps = int((metrics or {}).get(STEP, run.steps + 1))
        run.is_changed = True

    def end(self, run_id: str, why: str) -> None:
        """Note that a run is unloaded."""
        self._of(run_id).ended = why

    def take(self) -> dict[str, RunProgress]:
        """What has changed since this was last called, with the tokens since then."""
        runs = self._runs
        # Those that go on are kept, for their steps and loss.
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
