"""An engine as the test service runs it: short samples by default, and works that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tinsmith.engine.base import Engine, SampleWork, TrainingOutcome, TrainingWork
from tinsmith.errors import ValidationError
from tinsmith.observe.training_metrics import TOKENS
from tinsmith.types.training import ForwardBackwardOutput

FAILS = ValidationError("the command failed, as the test asked")
"""What a training work fails with; the ledger settles its command with what the rule says."""


class FaultyEngine:
    """An engine whose works fail where `is_failing` says so, and change nothing then.

    Everything that is not overridden here is the engine's own.
    """

    def __init__(self, engine: Engine, max_tokens: int, is_failing: Callable[[str], bool]) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._is_failing = is_failing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """`Engine.train`."""
        works = [work for work in batch if not self._is_failing(work.work_id)]
        done = {outcome.work_id: outcome for outcome in await self._engine.train(works)}
        return [
            _as_hosted(done.get(work.work_id)) or TrainingOutcome(work_id=work.work_id, error=FAILS)
            for work in batch
        ]

    def admit(self, sample: SampleWork) -> None:
        """`Engine.admit`.

        A sample that fails is one token long and not streamed; the ledger replaces its result.
        """
        request, params = sample.request, sample.request.sampling_params
        is_failing = self._is_failing(sample.work_id)
        if is_failing or params.max_tokens is None:
            most = 1 if is_failing else self._max_tokens
            params = msgspec.structs.replace(params, max_tokens=most)
            request = msgspec.structs.replace(request, sampling_params=params)
        self._engine.admit(
            msgspec.structs.replace(
                sample, request=request, is_streamed=sample.is_streamed and not is_failing
            )
        )


def _as_hosted(outcome: TrainingOutcome | None) -> TrainingOutcome | None:
    """An outcome without the metric that only tinsmith gives for a pass."""
    if outcome is not None and isinstance(outcome.result, ForwardBackwardOutput):
        outcome.result.metrics.pop(TOKENS, None)
    return outcome
