"""The settings of the scheduler."""

from __future__ import annotations

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and intervals of the scheduler. Times are seconds."""

    claimer: str = "scheduler"
    """The name under which it claims commands; the same after a restart."""
    most_claimed: int = 50_000
    """How many commands it holds at a time. Only their headers are in memory; further commands wait
    in the ledger, those of other tenants too."""
    gap_wait_s: float = 60.0
    """How long a command waits for one with a lower number that has not arrived."""
    told_after_s: float = 10.0
    """After how long a queue's state says that the engine is busy."""
    gap_look_s: float = 0.25
    """How often it checks meanwhile whether the missing number was refused."""
    engine_silence_s: float = 1800.0
    """How long an engine call may take before it is reported as a problem; 0 for no limit."""
    store_wait_s: float = 300.0
    """How long saves and loads wait for a checkpoint store that is unavailable."""
    most_batch_commands: int = 256
    """How many commands share one engine call."""
    most_batch_tokens: int = 65_536
    """How many tokens share one engine call, if the engine can take as many."""
    most_singles: int = 16
    """How many unbatched commands run at a time: creations, saves, loads."""
    most_sampler_weights: int = 64
    """How many samplers' weights stay loaded while no sample uses them."""
    most_unsettled: int = 4096
    """How many outcomes may wait for the ledger before running commands pause."""
    snapshot_commands: int = 2000
    """A model is snapshotted after so many commands, to keep a replay short ..."""
    snapshot_work_s: float = 30.0
    """... or after so much engine time ..."""
    snapshot_payload_bytes: int = 256 * 1024 * 1024
    """... or when the commands to replay have so many bytes."""
    snapshot_idle_s: float = 3.0
    """A model that has been idle for so long is snapshotted ..."""
    snapshot_idle_work_s: float = 1.0
    """... if its last snapshot lacks so much engine time."""
    autosave_ttl_s: float = 7 * 24 * 3600.0
    """How long the checkpoint of a lost session is kept."""
