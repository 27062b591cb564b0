"""Models that the scheduler knows: what they are made of, and whether they can be worked with.

A model is *ready* once its adapter is loaded. One that could not be made, or was let go of, stays
known with the reason, which every later command of it is answered with.
"""

from __future__ import annotations

import time

import msgspec

from tinsmith.engines.base import AdapterId, AdapterSpec
from tinsmith.errors import BadRequestError, TinkerError, without_frames
from tinsmith.ledger.model_config import read_config
from tinsmith.ledger.records import LineId, Model
from tinsmith.wire.failures import failed_from_error


def spec_of(model: Model) -> AdapterSpec:
    """What an adapter of a model is made of."""
    lora, optimizer = read_config(model.config)
    return AdapterSpec(
        adapter_id=AdapterId(model.id),
        base_model=model.base_model,
        lora=lora,
        optimizer=optimizer,
    )


class KnownModel(msgspec.Struct, kw_only=True):
    """A model, and how far it has come since its last snapshot."""

    spec: AdapterSpec
    is_ready: bool = False
    has_trained: bool = False
    """Whether there is anything to save."""
    trouble: TinkerError | None = None
    """Why nothing can be done with it."""
    unsaved_commands: int = 0
    unsaved_work_s: float = 0.0
    unsaved_bytes: int = 0
    worked_at: float = 0.0
    """When it was last trained, by the monotonic clock."""
    must_save: bool = False
    """Whether it has to be saved at once: a replay would need what may not be there any more."""

    def note_work(self, commands: int, payload_bytes: int, work_s: float) -> None:
        """Count what a replay would have to do again."""
        self.has_trained = True
        self.worked_at = time.monotonic()
        self.unsaved_commands += commands
        self.unsaved_bytes += payload_bytes
        self.unsaved_work_s += work_s

    def note_saved(self) -> None:
        """A snapshot holds everything."""
        self.unsaved_commands = self.unsaved_bytes = 0
        self.unsaved_work_s = 0.0
        self.must_save = False


class Models:
    """All of them."""

    def __init__(self) -> None:
        self._models: dict[LineId, KnownModel] = {}

    def add(self, spec: AdapterSpec) -> KnownModel:
        """Take note of a model that is to be made; the known one if there is one."""
        line = LineId(spec.adapter_id)
        return self._models.setdefault(line, KnownModel(spec=spec))

    def get(self, line: LineId) -> KnownModel | None:
        """A model, if it is known."""
        return self._models.get(line)

    def ready(self, line: LineId) -> KnownModel:
        """A model that can be worked with; raises the error that says why not."""
        known = self._models.get(line)
        if known is None:
            raise BadRequestError(
                f"model {line} is not loaded: it was never made, or its session has ended",
                remedy="create it again, from a checkpoint if there is one",
            )
        if known.trouble is not None:
            raise without_frames(known.trouble)  # else those of each command stay in it
        if not known.is_ready:
            raise BadRequestError(f"model {line} has not been made")
        return known

    def forget(self, line: LineId) -> None:
        """Nothing more will come for it."""
        self._models.pop(line, None)

    def all_ready(self) -> list[tuple[LineId, KnownModel]]:
        """Those that can be worked with."""
        return [(line, one) for line, one in self._models.items() if one.is_ready]


def could_not_be_made(line: LineId, error: BaseException) -> TinkerError:
    """The error for commands of a model whose creation failed."""
    return BadRequestError(f"model {line} could not be made: {failed_from_error(error).error}")


def was_let_go(line: LineId, why: str) -> TinkerError:
    """The error for commands of a model that is no longer held."""
    return BadRequestError(f"model {line} {why}", remedy="create a new one from a checkpoint")
