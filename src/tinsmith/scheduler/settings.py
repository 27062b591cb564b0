"""What can be set about the scheduler."""

from __future__ import annotations

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler goes about its work."""

    claimer: str = "scheduler"
    """Under which name it claims commands; its successor after a crash has the same."""
    most_claimed: int = 50_000
    """How many commands it holds at a time. Only their headers are in memory; a tenant's commands
    beyond them wait in the ledger, and hold up those of others."""
    gap_wait_s: float = 60.0
    """How long a command waits for one with a lower number that does not come."""
    told_after_s: float = 10.0
    """After so long a wait the state of a queue says that it waits for its turn."""
    gap_look_s: float = 0.25
    """How often it looks meanwhile whether the missing number was refused."""
    engine_silence_s: float = 1800.0
    """How long a call of the engine may take before it is told of as a problem; 0 for any time."""
    most_batch_commands: int = 256
    """How many commands share one call of the engine."""
    most_batch_tokens: int = 65_536
    """How many tokens share one call of the engine, if it can take as many."""
    most_singles: int = 16
    """How many commands that are not batched run at a time: creations, saves, loads."""
    most_sampler_weights: int = 64
    """How many samplers' weights stay loaded that no sample uses."""
    most_unsettled: int = 4096
    """How many outcomes may wait for the ledger before no more are made."""
    snapshot_commands: int = 2000
    """After so many commands a model's state is saved, so that a replay stays short."""
    snapshot_work_s: float = 30.0
    """... or after so much time of the engine."""
    snapshot_payload_bytes: int = 256 * 1024 * 1024
    """... or when the commands to be replayed take so much room."""
    snapshot_idle_s: float = 3.0
    """A model that has had nothing to do for so long is snapshotted ..."""
    snapshot_idle_work_s: float = 1.0
    """... if so much time of the engine is not in its last snapshot."""
    autosave_ttl_s: float = 7 * 24 * 3600.0
    """How long the checkpoint of a lost session is kept."""
