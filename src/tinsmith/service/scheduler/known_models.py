"""The models that the scheduler knows: what they are made of, and whether they can be used.

A model is *ready* once its adapter is loaded. One that could not be created, or was unloaded, stays
known together with the error that every later command of it fails with.
"""

from __future__ import annotations

import time

import msgspec

from tinsmith.engine.base import AdapterId, AdapterSpec
from tinsmith.errors import BadRequestError, TinkerError, without_frames
from tinsmith.service.ledger.model_config import read_config
from tinsmith.service.ledger.records import ModelEntry, QueueId
from tinsmith.wire.failures import failed_from_error


def spec_of(model: ModelEntry) -> AdapterSpec:
    """The specification of a model's adapter."""
    lora, optimizer = read_config(model.config)
    return AdapterSpec(
        adapter_id=AdapterId(model.id),
        base_model=model.base_model,
        lora=lora,
        optimizer=optimizer,
    )


class KnownModel(msgspec.Struct, kw_only=True):
    """A model, and what it has done since its last snapshot."""

    spec: AdapterSpec
    is_ready: bool = False
    has_trained: bool = False
    """Whether there is anything to save when its session ends."""
    error: TinkerError | None = None
    """Why its commands fail, if they do."""
    unsaved_commands: int = 0
    unsaved_work_s: float = 0.0
    unsaved_bytes: int = 0
    worked_at: float = 0.0
    """When it was last trained, by the monotonic clock."""
    must_save: bool = False
    """Whether a snapshot is due now: a replay would need files that may be deleted by then."""

    def note_work(self, commands: int, payload_bytes: int, work_s: float) -> None:
        """Count what a replay would have to repeat."""
        self.has_trained = True
        self.worked_at = time.monotonic()
        self.unsaved_commands += commands
        self.unsaved_bytes += payload_bytes
        self.unsaved_work_s += work_s

    def note_saved(self) -> None:
        """Start counting anew: a snapshot holds everything."""
        self.unsaved_commands = self.unsaved_bytes = 0
        self.unsaved_work_s = 0.0
        self.must_save = False


class KnownModels:
    """All known models, by the id of their queue."""

    def __init__(self) -> None:
        self._models: dict[QueueId, KnownModel] = {}

    def add(self, spec: AdapterSpec) -> KnownModel:
        """Add a model that is to be created; returns the known one if there is one."""
        queue_id = QueueId(spec.adapter_id)
        return self._models.setdefault(queue_id, KnownModel(spec=spec))

    def get(self, queue_id: QueueId) -> KnownModel | None:
        """A model, if it is known."""
        return self._models.get(queue_id)

    def ready(self, queue_id: QueueId) -> KnownModel:
        """A model that can be used.

        Raises:
            TinkerError: It cannot; the error says why.
        """
        known = self._models.get(queue_id)
        if known is None:
            raise BadRequestError(
                f"model {queue_id} is not loaded: it was never created, or its session has ended",
                remedy="create it again, from a checkpoint if there is one",
            )
        if known.error is not None:
            raise without_frames(known.error)  # or it would keep the frames of every command
        if not known.is_ready:
            raise BadRequestError(f"model {queue_id} has not been created yet")
        return known

    def forget(self, queue_id: QueueId) -> None:
        """Drop a model whose queue is closed."""
        self._models.pop(queue_id, None)

    def all_ready(self) -> list[tuple[QueueId, KnownModel]]:
        """The models that can be used."""
        return [(queue_id, one) for queue_id, one in self._models.items() if one.is_ready]


def creation_failed(queue_id: QueueId, error: BaseException) -> TinkerError:
    """The error for commands of a model whose creation failed."""
    return BadRequestError(
        f"model {queue_id} could not be created: {failed_from_error(error).error}"
    )


def model_unloaded(queue_id: QueueId, why: str) -> TinkerError:
    """The error for commands of a model that is no longer loaded."""
    return BadRequestError(f"model {queue_id} {why}", remedy="create a new one from a checkpoint")
