"""Training runs and their saved weights, as kept: added, found by path, expired.

`training.py` adds a run for each model and saves its weights here; samplers and loads take them
back by path; `checkpoints.py` answers the endpoints that list and change them.
"""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from tinsmith.errors import NotFoundError, ValidationError
from tinsmith.testing.account import Audit, now
from tinsmith.testing.arithmetic import Weights
from tinsmith.testing.downloads import checkpoint_files
from tinsmith.types.checkpoints import Checkpoint, ParsedCheckpointTinkerPath
from tinsmith.types.training import LoraConfig, OptimizerConfig

SHORTEST_TTL_S = 3600
LONGEST_TTL_S = 10 * 365 * 24 * 3600


class Run(msgspec.Struct, kw_only=True, eq=False):
    """A training run: a model, or the home of a copied checkpoint."""

    run_id: str
    project_id: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    user_metadata: dict[str, Any] | None
    last_request_at: datetime.datetime
    checkpoints: dict[str, Saved] = {}

    def living(self) -> dict[str, Saved]:
        """The checkpoints that have not expired, oldest first, by id."""
        moment = now()
        return {
            name: saved
            for name, saved in self.checkpoints.items()
            if saved.checkpoint.expires_at is None or saved.checkpoint.expires_at > moment
        }

    def files(self) -> dict[str, bytes]:
        """Its adapter as files, by name."""
        return checkpoint_files(self.base_model, self.lora.rank)


class Saved(msgspec.Struct, kw_only=True, eq=False):
    """One checkpoint, with its weights."""

    run: Run
    checkpoint: Checkpoint
    weights: Weights
    is_encrypted: bool = False

    def change(self, **fields: Any) -> None:
        """Set fields of the checkpoint."""
        self.checkpoint = self.checkpoint.model_copy(update=fields)


class CheckpointStore:
    """All runs and checkpoints of the service."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._runs: dict[str, Run] = {}

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return list(self._runs.values())

    def run(self, run_id: str) -> Run:
        """One run; raises `NotFoundError`."""
        if run_id not in self._runs:
            raise NotFoundError(f"there is no training run {run_id!r}")
        return self._runs[run_id]

    def add_run(self, run: Run) -> Run:
        """Keep a run, so that it is listed and can have checkpoints."""
        self._runs[run.run_id] = run
        return run

    def save(
        self,
        run: Run,
        checkpoint_id: str,
        weights: Weights,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        is_encrypted: bool = False,
    ) -> Saved:
        """Keep a copy of the weights as they are now.

        Raises:
            ValidationError: The name is taken or not allowed, or the time to live is.
        """
        path = f"tinker://{run.run_id}/{checkpoint_id}"
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        if checkpoint_id in run.living() and not overwrite:
            raise ValidationError(f"{path} exists", remedy="save with another name or overwrite")
        checkpoint = Checkpoint(
            checkpoint_id=checkpoint_id,
            checkpoint_type=parsed.checkpoint_type,
            time=now(),
            tinker_path=path,
            size_bytes=sum(map(len, run.files().values())),
            user_metadata=user_metadata,
            expires_at=expiry(ttl_seconds),
        )
        saved = Saved(
            run=run, checkpoint=checkpoint, weights=weights.copy(), is_encrypted=is_encrypted
        )
        run.checkpoints.pop(checkpoint_id, None)  # an overwritten one becomes the newest
        run.checkpoints[checkpoint_id] = saved
        self._audit.add("checkpoint.created", {"type": parsed.checkpoint_type}, tinker_path=path)
        return saved

    def at_path(self, tinker_path: str) -> Saved:
        """The checkpoint with this path; raises `NotFoundError`, and `ValidationError`."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self.find(parsed.training_run_id, parsed.checkpoint_id)

    def find(self, run_id: str, checkpoint_id: str) -> Saved:
        """The checkpoint with this id; raises `NotFoundError`."""
        run = self._runs.get(run_id)
        saved = None if run is None else run.living().get(checkpoint_id)
        if saved is None:
            raise NotFoundError(f"there is no checkpoint tinker://{run_id}/{checkpoint_id}")
        return saved

    def sizes(self, run_ids: list[str]) -> list[int]:
        """The sizes of all checkpoints of some runs."""
        runs = [self._runs[run_id] for run_id in run_ids if run_id in self._runs]
        return [saved.checkpoint.size_bytes or 0 for run in runs for saved in run.living().values()]


def expiry(ttl_seconds: int | None) -> datetime.datetime | None:
    """When something with this time to live expires; raises `ValidationError` outside its range."""
    if ttl_seconds is None:
        return None
    if not SHORTEST_TTL_S <= ttl_seconds <= LONGEST_TTL_S:
        raise ValidationError(
            f"ttl_seconds is {ttl_seconds}; it may be {SHORTEST_TTL_S} to {LONGEST_TTL_S}"
        )
    return now() + datetime.timedelta(seconds=ttl_seconds)
