"""The metrics of a service, each with its name, in one place. docs/reference/metrics.md lists them.

A service has one `ServiceMetrics`. Events are counted as they happen; figures that a component
keeps anyway are read when the metrics are. The scheduler's figures come by name: `FIGURES` says
which metric each of them is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tinsmith._version import __version__
from tinsmith.observe.instruments import Registry

_STARTED_AT = time.time()

FIGURES = {
    "done_commands": ("tinsmith_commands_done_total", "Commands of models that succeeded."),
    "failed_commands": ("tinsmith_commands_failed_total", "Commands of models that failed."),
    "done_samples": ("tinsmith_samples_done_total", "Samples that succeeded."),
    "failed_samples": ("tinsmith_samples_failed_total", "Samples that failed."),
    "cancelled_commands": (
        "tinsmith_commands_cancelled_total",
        "Commands and samples cancelled by their clients.",
    ),
    "skipped_numbers": (
        "tinsmith_numbers_skipped_total",
        "Command numbers that never arrived and were skipped.",
    ),
    "batches": ("tinsmith_batches_total", "Training batches run by the engine."),
    "batched_commands": ("tinsmith_batched_commands_total", "Commands in those batches."),
    "failed_batches": ("tinsmith_batches_failed_total", "Batches that failed in the engine."),
    "trained_tokens": ("tinsmith_trained_tokens_total", "Tokens of forward and backward passes."),
    "sampled_tokens": ("tinsmith_sampled_tokens_total", "Tokens sampled."),
    "training_s": ("tinsmith_training_seconds_total", "Engine time spent on training."),
    "sampling_s": ("tinsmith_sampling_seconds_total", "Engine time spent on sampling."),
    "checkpoints": ("tinsmith_checkpoints_saved_total", "Checkpoints saved."),
    "loaded_weights": (
        "tinsmith_weights_loaded_total",
        "Sampler weights loaded into the engine.",
    ),
    "snapshots": ("tinsmith_snapshots_total", "Model snapshots written."),
    "snapshot_s": ("tinsmith_snapshot_seconds_total", "Time spent on writing snapshots."),
    "failed_snapshots": ("tinsmith_snapshots_failed_total", "Snapshots that failed."),
    "recovered_models": (
        "tinsmith_recovered_models_total",
        "Models recovered at the start.",
    ),
    "redone_commands": (
        "tinsmith_redone_commands_total",
        "Commands run again during recovery.",
    ),
    "recovery_s": ("tinsmith_recovery_seconds_total", "Time spent on recovery."),
    "lost_models": ("tinsmith_lost_models_total", "Models that could not be recovered."),
    "lost_replicas": (
        "tinsmith_replica_losses_total",
        "How often the models of a lost replica had to be restored.",
    ),
    "restored_models": (
        "tinsmith_restored_models_total",
        "Models restored after the loss of their replica.",
    ),
    "restore_s": ("tinsmith_restore_seconds_total", "Time spent on restoring those models."),
    "repeated_samples": (
        "tinsmith_samples_repeated_total",
        "Samples started again after the loss of their replica.",
    ),
    "ledger_outages": (
        "tinsmith_ledger_outages_total",
        "How often the scheduler found the ledger unavailable.",
    ),
    "held_commands": ("tinsmith_held_commands", "Commands claimed by the scheduler."),
    "queued_commands": ("tinsmith_queued_commands", "Queued commands of models."),
    "queued_samples": ("tinsmith_queued_samples", "Queued samples."),
    "samples_under_way": ("tinsmith_samples_under_way", "Samples running."),
    "lines": ("tinsmith_lines", "Models with queued commands."),
    "gapped_lines": ("tinsmith_gapped_lines", "Queues waiting for a missing command number."),
    "unsettled": ("tinsmith_unsettled_outcomes", "Outcomes not yet written to the ledger."),
    "engine_silence_s": (
        "tinsmith_engine_silence_seconds",
        "Duration of the engine's longest call still running.",
    ),
    "adapters": ("tinsmith_adapters", "Adapters loaded in the engine."),
    "most_adapters": ("tinsmith_adapters_limit", "The most adapters that the engine can hold."),
}
"""The scheduler's figures: the metric that each is, and what it says. `_total` is a counter."""


class ServiceMetrics:
    """Everything that is measured about one service."""

    def __init__(self) -> None:
        registry = self.registry = Registry()
        counter, gauge = registry.counter, registry.gauge
        histogram, read_counter = registry.histogram, registry.read_counter

        # The server
        self.http_requests = counter(
            "tinsmith_http_requests_total",
            "Requests by status; `left` if the client left before the answer.",
            "endpoint",
            "status",
        )
        self.http_seconds = histogram(
            "tinsmith_http_request_seconds",
            "Time from a request to the end of its answer, including long polls.",
            "endpoint",
        )
        self.http_received_bytes = counter(
            "tinsmith_http_received_bytes_total", "Bytes of request bodies, as they were sent."
        )
        self.http_sent_bytes = counter("tinsmith_http_sent_bytes_total", "Bytes of answer bodies.")
        self.unauthorised = counter("tinsmith_unauthorised_total", "Requests without a valid key.")
        self.body_bytes = gauge(
            "tinsmith_http_body_bytes",
            "Memory of request bodies being processed, except small ones.",
        )
        self.answer_bytes = gauge(
            "tinsmith_http_answer_bytes",
            "Memory of answers not yet read by clients, except small and streamed ones.",
        )
        self.bodies_refused = read_counter(
            "tinsmith_http_bodies_refused_total",
            "Bodies refused as too slow (`slow`, 408) or for lack of memory (429) in the budget of "
            "their `tenant`, their `address` or in `total`.",
            "reason",
        )
        self.connections = gauge(
            "tinsmith_connections",
            "Open connections: `authenticated` after a valid key was shown, `unauthenticated` "
            "before.",
            "state",
        )
        self.connections_closed = read_counter(
            "tinsmith_connections_closed_total",
            "Connections closed because there were too many: of one `address` or in all "
            "(`unauthenticated`) before they showed a key, or in `total`.",
            "limit",
        )
        self.long_polls = gauge("tinsmith_long_polls", "Long polls waiting for a result.")

        # The scheduler
        self.ready = gauge("tinsmith_ready", "1 while commands are run, otherwise 0.")
        self.engine_losses = read_counter(
            "tinsmith_engine_losses_total", "How often a process of the engine ended unexpectedly."
        )
        self._figures: Callable[[], Mapping[str, float]] = dict
        for figure, (name, text) in FIGURES.items():
            made = read_counter if name.endswith("_total") else gauge
            made(name, text).read_with(self._figure(figure))

        # The ledger
        self.commands_pending = gauge(
            "tinsmith_commands_pending",
            "Commands in the ledger that are not settled: `pending` or `claimed`.",
            "state",
        )
        self.oldest_pending_seconds = gauge(
            "tinsmith_oldest_pending_seconds", "Age of the oldest pending command."
        )
        self.ledger_commits = read_counter(
            "tinsmith_ledger_commits_total", "Commits of the ledger since the start."
        )
        self.ledger_writes = read_counter(
            "tinsmith_ledger_writes_total", "Changes written in those commits."
        )
        self.ledger_lock_waited = read_counter(
            "tinsmith_ledger_lock_waited_seconds_total",
            "How long changes have waited for those of other servers on the same PostgreSQL"
            " database; new commands wait for nothing.",
        )
        self.ledger_lock_held = read_counter(
            "tinsmith_ledger_lock_held_seconds_total",
            "How long changes have kept those of other servers waiting.",
        )
        self.ledger_bytes = gauge("tinsmith_ledger_bytes", "Size of the database on disk.")
        self.payload_bytes = gauge("tinsmith_payload_bytes", "Size of stored payloads and results.")
        self.payload_files = gauge(
            "tinsmith_payload_files", "Payloads stored in files of their own."
        )
        self.free_bytes = gauge("tinsmith_free_bytes", "Free space on the disk of the data folder.")

        # The process
        gauge("tinsmith_build_info", "1, labelled with the version.", "version").set(1, __version__)
        read_counter("process_cpu_seconds_total", "CPU time of the process.").read_with(
            time.process_time
        )
        gauge("process_resident_memory_bytes", "Resident memory of the process.").read_with(
            resident_bytes
        )
        gauge("process_open_fds", "Open files and sockets of the process.").read_with(open_files)
        gauge(
            "process_start_time_seconds", "Start time of the process, in seconds since the epoch."
        ).set(_STARTED_AT)

    def read_figures(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Take the scheduler's figures from this function; it must be quick and not wait."""
        self._figures = read

    def exposition(self) -> str:
        """All of them, as `/metrics` answers."""
        return self.registry.exposition()

    def _figure(self, name: str) -> Callable[[], float]:
        return lambda: self._figures().get(name, 0.0)


def resident_bytes() -> float:
    """The memory that this process has in use; NaN where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return float("nan")


def open_files() -> float:
    """How many files this process has open; NaN where the system does not say."""
    try:
        return float(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - names are enough
    except OSError:
        return float("nan")
