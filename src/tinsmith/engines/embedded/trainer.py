"""Works of many adapters into as few passes as they fit in, and their outcomes.

Works of one adapter take effect in their order. Passes that stand next to each other run together,
with each other and with those of other adapters on the same base model; a pass behind a step waits
for it. What a pass gathers is kept apart until all of it is known to be good, and is then added
to its adapter, pass by pass in their order: what shared a pack cannot be seen in the numbers.

Plain synchronous code, for several threads as long as each trains other adapters.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from tinsmith.engines.base import (
    AdapterId,
    PassWork,
    StepWork,
    TrainingOutcome,
    TrainingWork,
)
from tinsmith.engines.embedded.adapters import Adapter
from tinsmith.engines.embedded.passes import Pass, run_pack
from tinsmith.engines.embedded.pieces import Budget, Pack, make_packs
from tinsmith.errors import ClosedError, NotFoundError, TinkerError, ValidationError
from tinsmith.model.architecture import Architecture
from tinsmith.model.spare_vectors import SpareVectors
from tinsmith.model.transformer import Transformer
from tinsmith.types.training import ForwardBackwardOutput, OptimStepResponse

_log = logging.getLogger(__name__)

MOST_SCRATCH_BYTES = 1 << 30
"""What the gradients of passes that run together may take before they are added up."""
_NO_MEMORY = ("not enough memory", "out of memory", "can't allocate memory")

Result: TypeAlias = ForwardBackwardOutput | OptimStepResponse
Work = TypeVar("Work", PassWork, StepWork)
Ended: TypeAlias = dict[int, TrainingOutcome]
"""By the place of the work in the batch."""


def budget_for(architecture: Architecture, dtype: torch.dtype, pass_bytes: int) -> Budget:
    """How many rows may be computed together, if what is kept of them may take so many bytes.

    It depends on nothing that changes: it decides how a work is cut, and with that the last bits of
    its gradients.
    """
    hidden, inner, queries = architecture.hidden, architecture.inner, architecture.query_outputs
    # What all layers add to is float32, and kept where norms read it.
    stream_bytes = hidden * torch.float32.itemsize
    kept = 4 * hidden + 2 * (queries + 2 * architecture.key_outputs) + queries + 4 * inner
    layer_bytes, layers = kept * dtype.itemsize + 2 * stream_bytes, len(architecture.layers)
    saving_bytes = layer_bytes + layers * stream_bytes
    rows = max(64, pass_bytes // (layer_bytes * layers))
    return Budget(rows=rows, saving_rows=max(rows, pass_bytes // saving_bytes))


class Trainer:
    """See the top of the module.

    Args:
        models: The base models, by every name that they have.
        pass_bytes: What may be kept of rows that are computed together.
    """

    def __init__(self, models: Mapping[str, Transformer], *, pass_bytes: int) -> None:
        self._models = models
        self._budgets = {
            id(model): budget_for(model.architecture, model.dtype, pass_bytes)
            for model in models.values()
        }
        self._spares = SpareVectors()
        self._is_closing = False

    @property
    def rows(self) -> int:
        """How many rows a pack has at most, on the model where these are most."""
        return max(budget.rows for budget in self._budgets.values())

    def close(self) -> None:
        """What runs ends at the next pack. From any thread."""
        self._is_closing = True

    def train(
        self, batch: Sequence[TrainingWork], adapters: Mapping[AdapterId, Adapter]
    ) -> list[TrainingOutcome]:
        """`Engine.train`.

        Raises:
            ClosedError: The engine is being closed; adapters may have had some of the works.
        """
        ended: Ended = {}
        lines: dict[AdapterId, deque[tuple[int, TrainingWork]]] = {}
        for place, work in enumerate(batch):
            lines.setdefault(work.adapter_id, deque()).append((place, work))
        while any(lines.values()):
            self._run_passes(_heads(lines, PassWork), adapters, ended)
            for place, step in _heads(lines, StepWork):
                ended[place] = _outcome(step, partial(self._step, step, adapters))
        return [ended[place] for place in range(len(batch))]

    def _step(self, work: StepWork, adapters: Mapping[AdapterId, Adapter]) -> OptimStepResponse:
        metrics = _loaded(work, adapters).step(work.params, self._spares)
        return OptimStepResponse(metrics=metrics)

    # Passes

    def _run_passes(
        self,
        works: Sequence[tuple[int, PassWork]],
        adapters: Mapping[AdapterId, Adapter],
        ended: Ended,
    ) -> None:
        passes: list[tuple[int, Pass]] = []
        for place, work in works:
            try:
                passes.append((place, self._read(work, adapters)))
            except Exception as exc:  # noqa: BLE001 - it is this work's outcome and no other's
                ended[place] = TrainingOutcome(work_id=work.work_id, error=_told(exc))
        for some in _by_scratch(passes):
            failed = self._run_together([one for _, one in some])
            for place, one in some:
                ended[place] = _finished(one, failed.get(one))
                one.release()

    def _read(self, work: PassWork, adapters: Mapping[AdapterId, Adapter]) -> Pass:
        adapter = _loaded(work, adapters)
        model = self._models[adapter.spec.base_model]
        return Pass(work, adapter, model, self._budgets[id(model)], self._spares)

    def _run_together(self, passes: Sequence[Pass]) -> dict[Pass, Exception]:
        """Run passes in shared packs, and alone those whose pack failed; why that failed too."""
        failed: dict[Pass, Exception] = {}
        for one in self._run(passes, is_shared=True):
            one.release()
            failed |= self._run([one], is_shared=False)
        return failed

    def _run(self, passes: Sequence[Pass], *, is_shared: bool) -> dict[Pass, Exception]:
        """Run passes; those that a pack failed with, whoever of them was to blame."""
        failed: dict[Pass, Exception] = {}
        for model, some in _by_model(passes):
            budget = self._budgets[id(model)] if is_shared else Budget(0, 0)
            started = [one for one in some if _is_started(one, failed)]
            for pack in make_packs([(one, one.pieces) for one in started], budget):
                self._run_pack(model, pack, failed, is_shared)
        return failed

    def _run_pack(
        self, model: Transformer, pack: Pack[Pass], failed: dict[Pass, Exception], is_shared: bool
    ) -> None:
        if self._is_closing:
            raise ClosedError("the engine is closed")
        pack.pieces = [(owner, piece) for owner, piece in pack.pieces if owner not in failed]
        if not pack.pieces:
            return
        try:
            # One that runs again had not enough memory, or something unforeseen: with care now.
            run_pack(model, pack, saves_memory=not is_shared)
        except Exception as exc:  # noqa: BLE001 - tried again alone, and then told as an outcome
            failed |= {owner: exc for owner, _ in pack.pieces}
            _log.warning("a pack of %d rows failed: %s", pack.rows, exc)


def _heads(
    lines: Mapping[AdapterId, deque[tuple[int, TrainingWork]]], kind: type[Work]
) -> list[tuple[int, Work]]:
    """Take the works of a kind that each line begins with, in the order of the batch."""
    taken: list[tuple[int, Work]] = []
    for line in lines.values():
        while line and isinstance(work := line[0][1], kind):
            taken.append((line.popleft()[0], work))
    return sorted(taken, key=lambda one: one[0])


def _by_scratch(passes: Sequence[tuple[int, Pass]]) -> Iterator[list[tuple[int, Pass]]]:
    """As many passes together as there is memory for their gradients."""
    some: list[tuple[int, Pass]] = []
    room = MOST_SCRATCH_BYTES
    for place, one in passes:
        if some and one.scratch_bytes > room:
            yield some
            some, room = [], MOST_SCRATCH_BYTES
        some.append((place, one))
        room -= one.scratch_bytes
    if some:
        yield some


def _by_model(passes: Sequence[Pass]) -> list[tuple[Transformer, list[Pass]]]:
    """Passes that can share packs."""
    found: dict[tuple[int, bool], list[Pass]] = {}
    for one in passes:
        found.setdefault((id(one.model), one.work.with_gradients), []).append(one)
    return [(some[0].model, some) for some in found.values()]


def _is_started(one: Pass, failed: dict[Pass, Exception]) -> bool:
    try:
        one.start()
    except Exception as exc:  # noqa: BLE001 - no memory, which is told as an outcome
        failed[one] = exc
    return one not in failed


def _finished(one: Pass, failure: Exception | None) -> TrainingOutcome:
    def run() -> Result:
        if failure is not None:
            raise failure
        result = one.result()
        if one.work.with_gradients:
            one.gather()
        return result

    return _outcome(one.work, run)


def _outcome(work: TrainingWork, run: Callable[[], Result]) -> TrainingOutcome:
    try:
        return TrainingOutcome(work_id=work.work_id, result=run())
    except Exception as exc:  # noqa: BLE001 - it is this work's outcome and no other's
        return TrainingOutcome(work_id=work.work_id, error=_told(exc))


def _told(error: Exception) -> Exception:
    """An error as it is answered: what a user can mend is said in their words."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, TinkerError)
        and any(words in str(error) for words in _NO_MEMORY)
    )
    if not is_memory:
        return error
    told = ValidationError(
        "there was not enough memory for this; the model is as it was",
        remedy="send fewer or shorter sequences in one call",
    )
    told.__cause__ = error
    return told


def _loaded(work: TrainingWork, adapters: Mapping[AdapterId, Adapter]) -> Adapter:
    adapter = adapters.get(work.adapter_id)
    if adapter is None:
        raise NotFoundError(f"model {work.adapter_id} is not loaded")
    return adapter
