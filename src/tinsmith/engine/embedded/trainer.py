"""Runs training works of many adapters in as few packed batches as possible.

Works on one adapter take effect in order. Consecutive passes run together, with each other and with
those of other adapters on the same base model; a pass after an optimizer step waits for it. The
gradients of a pass are kept separate until all of it has succeeded, and are then added to its
adapter, pass by pass in order. So results do not depend on what shared a batch.

Synchronous; several threads may train different adapters.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from tinsmith.engine.base import (
    AdapterId,
    PassWork,
    StepWork,
    TrainingOutcome,
    TrainingWork,
)
from tinsmith.engine.embedded.adapter_state import AdapterState
from tinsmith.engine.embedded.micro_batches import PackedBatch, RowBudget, pack_micro_batches
from tinsmith.engine.embedded.training_pass import TrainingPass, run_packed_batch
from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.optimizer import VectorPool
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import ClosedError, NotFoundError, TinkerError, ValidationError
from tinsmith.types.training import ForwardBackwardOutput, OptimStepResponse

_log = logging.getLogger(__name__)

MOST_GRADIENT_BYTES = 1 << 30
"""Maximum memory for the separate gradients of passes that run together."""
_OUT_OF_MEMORY = ("not enough memory", "out of memory", "can't allocate memory")

Result: TypeAlias = ForwardBackwardOutput | OptimStepResponse
Work = TypeVar("Work", PassWork, StepWork)
Ended: TypeAlias = dict[int, TrainingOutcome]
"""By index of the work in the batch."""


def budget_for(architecture: Architecture, dtype: torch.dtype, pass_bytes: int) -> RowBudget:
    """How many rows may be computed together if their activations may take `pass_bytes`.

    A pure function of its arguments: it decides how a work is split into micro-batches, and thus
    the last bits of its gradients.
    """
    hidden, inner, queries = architecture.hidden, architecture.inner, architecture.query_outputs
    # The residual stream is float32, and saved where norms read it.
    stream_bytes = hidden * torch.float32.itemsize
    kept = 4 * hidden + 2 * (queries + 2 * architecture.key_outputs) + queries + 4 * inner
    layer_bytes, layers = kept * dtype.itemsize + 2 * stream_bytes, len(architecture.layers)
    saving_bytes = layer_bytes + layers * stream_bytes
    rows = max(64, pass_bytes // (layer_bytes * layers))
    return RowBudget(rows=rows, recompute_rows=max(rows, pass_bytes // saving_bytes))


class Trainer:
    """Trains adapters on a set of base models.

    Args:
        models: The base models by name, aliases included.
        pass_bytes: Memory for the activations of one packed batch.
    """

    def __init__(self, models: Mapping[str, Transformer], *, pass_bytes: int) -> None:
        self._models = models
        self._budgets = {
            id(model): budget_for(model.architecture, model.dtype, pass_bytes)
            for model in models.values()
        }
        self._pool = VectorPool()
        self._is_closing = False

    @property
    def rows(self) -> int:
        """The largest row budget of a packed batch, over all models."""
        return max(budget.rows for budget in self._budgets.values())

    def close(self) -> None:
        """Make running calls fail at the next packed batch. Thread-safe."""
        self._is_closing = True

    def train(
        self, batch: Sequence[TrainingWork], adapters: Mapping[AdapterId, AdapterState]
    ) -> list[TrainingOutcome]:
        """Run a batch of works; returns one outcome per work, in the same order.

        Raises:
            ClosedError: The engine is being closed; some works may have taken effect.
        """
        ended: Ended = {}
        queues: dict[AdapterId, deque[tuple[int, TrainingWork]]] = {}
        for place, work in enumerate(batch):
            queues.setdefault(work.adapter_id, deque()).append((place, work))
        while any(queues.values()):
            self._run_passes(_heads(queues, PassWork), adapters, ended)
            for place, step in _heads(queues, StepWork):
                ended[place] = _outcome(step, partial(self._step, step, adapters))
        return [ended[place] for place in range(len(batch))]

    def _step(
        self, work: StepWork, adapters: Mapping[AdapterId, AdapterState]
    ) -> OptimStepResponse:
        metrics = _loaded(work, adapters).step(work.params, self._pool)
        return OptimStepResponse(metrics=metrics)

    # Passes

    def _run_passes(
        self,
        works: Sequence[tuple[int, PassWork]],
        adapters: Mapping[AdapterId, AdapterState],
        ended: Ended,
    ) -> None:
        passes: list[tuple[int, TrainingPass]] = []
        for place, work in works:
            try:
                passes.append((place, self._make_pass(work, adapters)))
            except Exception as exc:  # noqa: BLE001 - this work fails alone
                ended[place] = TrainingOutcome(work_id=work.work_id, error=_user_error(exc))
        for some in _by_gradient_memory(passes):
            failed = self._run_together([one for _, one in some])
            for place, one in some:
                ended[place] = _finished(one, failed.get(one))
                one.release()

    def _make_pass(
        self, work: PassWork, adapters: Mapping[AdapterId, AdapterState]
    ) -> TrainingPass:
        adapter = _loaded(work, adapters)
        model = self._models[adapter.spec.base_model]
        return TrainingPass(work, adapter, model, self._budgets[id(model)], self._pool)

    def _run_together(self, passes: Sequence[TrainingPass]) -> dict[TrainingPass, Exception]:
        """Run passes in shared batches, and retry failed ones alone; the errors of the retries."""
        failed: dict[TrainingPass, Exception] = {}
        for one in self._run(passes, is_shared=True):
            one.release()
            failed |= self._run([one], is_shared=False)
        return failed

    def _run(
        self, passes: Sequence[TrainingPass], *, is_shared: bool
    ) -> dict[TrainingPass, Exception]:
        """Run passes; returns all passes of batches that failed, with the error."""
        failed: dict[TrainingPass, Exception] = {}
        for model, some in _by_model(passes):
            budget = self._budgets[id(model)] if is_shared else RowBudget(0, 0)
            started = [one for one in some if _is_started(one, failed)]
            for batch in pack_micro_batches([(one, one.micro_batches) for one in started], budget):
                self._run_batch(model, batch, failed, is_shared)
        return failed

    def _run_batch(
        self,
        model: Transformer,
        batch: PackedBatch[TrainingPass],
        failed: dict[TrainingPass, Exception],
        is_shared: bool,
    ) -> None:
        if self._is_closing:
            raise ClosedError("the engine is closed")
        batch.micro_batches = [
            (owner, micro_batch)
            for owner, micro_batch in batch.micro_batches
            if owner not in failed
        ]
        if not batch.micro_batches:
            return
        try:
            # A retry after running out of memory, or after a bug, recomputes activations.
            run_packed_batch(model, batch, recomputes=not is_shared)
        except Exception as exc:  # noqa: BLE001 - retried alone, then the work's outcome
            failed |= {owner: exc for owner, _ in batch.micro_batches}
            _log.warning("a packed batch of %d rows failed: %s", batch.rows, exc)


def _heads(
    queues: Mapping[AdapterId, deque[tuple[int, TrainingWork]]], kind: type[Work]
) -> list[tuple[int, Work]]:
    """Pop the works of one kind from the head of each queue, in batch order."""
    taken: list[tuple[int, Work]] = []
    for queue in queues.values():
        while queue and isinstance(work := queue[0][1], kind):
            taken.append((queue.popleft()[0], work))
    return sorted(taken, key=lambda one: one[0])


def _by_gradient_memory(
    passes: Sequence[tuple[int, TrainingPass]],
) -> Iterator[list[tuple[int, TrainingPass]]]:
    """Groups of passes whose separate gradients fit into memory together."""
    some: list[tuple[int, TrainingPass]] = []
    room = MOST_GRADIENT_BYTES
    for place, one in passes:
        if some and one.gradient_bytes > room:
            yield some
            some, room = [], MOST_GRADIENT_BYTES
        some.append((place, one))
        room -= one.gradient_bytes
    if some:
        yield some


def _by_model(passes: Sequence[TrainingPass]) -> list[tuple[Transformer, list[TrainingPass]]]:
    """Groups of passes that can share batches."""
    found: dict[tuple[int, bool], list[TrainingPass]] = {}
    for one in passes:
        found.setdefault((id(one.model), one.work.with_gradients), []).append(one)
    return [(some[0].model, some) for some in found.values()]


def _is_started(one: TrainingPass, failed: dict[TrainingPass, Exception]) -> bool:
    try:
        one.start()
    except Exception as exc:  # noqa: BLE001 - out of memory: the work's outcome
        failed[one] = exc
    return one not in failed


def _finished(one: TrainingPass, failure: Exception | None) -> TrainingOutcome:
    def run() -> Result:
        if failure is not None:
            raise failure
        result = one.result()
        if one.work.with_gradients:
            one.accumulate()
        return result

    return _outcome(one.work, run)


def _outcome(work: TrainingWork, run: Callable[[], Result]) -> TrainingOutcome:
    try:
        return TrainingOutcome(work_id=work.work_id, result=run())
    except Exception as exc:  # noqa: BLE001 - this work fails alone
        return TrainingOutcome(work_id=work.work_id, error=_user_error(exc))


def _user_error(error: Exception) -> Exception:
    """Turn out-of-memory errors into ones that tell the user what to do."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, TinkerError)
        and any(words in str(error) for words in _OUT_OF_MEMORY)
    )
    if not is_memory:
        return error
    shown = ValidationError(
        "not enough memory for this call; the model is unchanged",
        remedy="send fewer or shorter sequences in one call",
    )
    shown.__cause__ = error
    return shown


def _loaded(work: TrainingWork, adapters: Mapping[AdapterId, AdapterState]) -> AdapterState:
    adapter = adapters.get(work.adapter_id)
    if adapter is None:
        raise NotFoundError(f"model {work.adapter_id} is not loaded")
    return adapter
