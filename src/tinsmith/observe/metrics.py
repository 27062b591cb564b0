"""The metrics of a service, each with its name, in one place. docs/reference/metrics.md lists them.

A service has one `ServiceMetrics`. What happens is counted as it does; what a part of the service
knows anyway is read when the metrics are. The scheduler's figures come by name: `FIGURES` says
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
    "done_commands": ("tinsmith_commands_done_total", "Commands of models that ended well."),
    "failed_commands": ("tinsmith_commands_failed_total", "Commands of models that failed."),
    "done_samples": ("tinsmith_samples_done_total", "Samples that ended well."),
    "failed_samples": ("tinsmith_samples_failed_total", "Samples that failed."),
    "cancelled_commands": (
        "tinsmith_commands_cancelled_total",
        "Commands and samples that their clients gave up.",
    ),
    "skipped_numbers": (
        "tinsmith_numbers_skipped_total",
        "Numbers of commands that never came and were waited for in vain.",
    ),
    "batches": ("tinsmith_batches_total", "Training batches that the engine ran."),
    "batched_commands": ("tinsmith_batched_commands_total", "Commands in those batches."),
    "failed_batches": ("tinsmith_batches_failed_total", "Batches that the engine could not run."),
    "trained_tokens": ("tinsmith_trained_tokens_total", "Tokens of forward and backward passes."),
    "sampled_tokens": ("tinsmith_sampled_tokens_total", "Tokens that were drawn."),
    "training_s": ("tinsmith_training_seconds_total", "Time of the engine that training took."),
    "sampling_s": ("tinsmith_sampling_seconds_total", "Time of the engine that sampling took."),
    "checkpoints": ("tinsmith_checkpoints_saved_total", "Checkpoints that were saved."),
    "loaded_weights": (
        "tinsmith_weights_loaded_total",
        "Weights of samplers that were loaded into the engine.",
    ),
    "snapshots": ("tinsmith_snapshots_total", "Snapshots of models that were written."),
    "snapshot_s": ("tinsmith_snapshot_seconds_total", "How long they took to write."),
    "failed_snapshots": ("tinsmith_snapshots_failed_total", "Snapshots that failed."),
    "recovered_models": (
        "tinsmith_recovered_models_total",
        "Models that were brought back at the start.",
    ),
    "redone_commands": (
        "tinsmith_redone_commands_total",
        "Commands that were run again for that.",
    ),
    "recovery_s": ("tinsmith_recovery_seconds_total", "How long that took."),
    "lost_models": ("tinsmith_lost_models_total", "Models that could not be brought back."),
    "ledger_outages": (
        "tinsmith_ledger_outages_total",
        "Times that the scheduler found the ledger unavailable.",
    ),
    "held_commands": ("tinsmith_held_commands", "Commands that the scheduler has claimed."),
    "queued_commands": ("tinsmith_queued_commands", "Commands of models that wait their turn."),
    "queued_samples": ("tinsmith_queued_samples", "Samples that wait their turn."),
    "samples_under_way": ("tinsmith_samples_under_way", "Samples that are being drawn."),
    "lines": ("tinsmith_lines", "Models with commands in the line."),
    "gapped_lines": ("tinsmith_gapped_lines", "Lines that wait for a number that is missing."),
    "unsettled": ("tinsmith_unsettled_outcomes", "Outcomes that wait for the ledger."),
    "engine_silence_s": (
        "tinsmith_engine_silence_seconds",
        "How long the engine has not come back from its longest call under way.",
    ),
    "adapters": ("tinsmith_adapters", "Adapters that the engine holds."),
    "most_adapters": ("tinsmith_adapters_limit", "How many it can hold."),
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
            "Requests that were answered; `left` if the client did not wait for it.",
            "endpoint",
            "status",
        )
        self.http_seconds = histogram(
            "tinsmith_http_request_seconds",
            "From the first byte of a request to the last of its answer, long polls included.",
            "endpoint",
        )
        self.http_received_bytes = counter(
            "tinsmith_http_received_bytes_total", "Bodies of requests, as they were sent."
        )
        self.http_sent_bytes = counter("tinsmith_http_sent_bytes_total", "Bodies of answers.")
        self.unauthorised = counter(
            "tinsmith_unauthorised_total", "Requests without a key that is valid."
        )
        self.body_bytes = gauge(
            "tinsmith_http_body_bytes", "Bodies of requests that are being read; small ones aside."
        )
        self.answer_bytes = gauge(
            "tinsmith_http_answer_bytes",
            "Answers that clients have not read yet; small and streamed ones aside.",
        )
        self.bodies_refused = read_counter(
            "tinsmith_http_bodies_refused_total",
            "Bodies that arrived too slowly (`slow`, 408) or found no room (429) in the budget of "
            "their `tenant`, their `address` or in `total`.",
            "reason",
        )
        self.connections = gauge(
            "tinsmith_connections",
            "Open connections: `authenticated` once a valid key was shown, `unauthenticated` "
            "before.",
            "state",
        )
        self.connections_closed = read_counter(
            "tinsmith_connections_closed_total",
            "Connections that were closed because there were too many: of one `address` or in all "
            "(`unauthenticated`) before they showed a key, or in `total`.",
            "limit",
        )
        self.long_polls = gauge("tinsmith_long_polls", "Polls that wait for a result.")

        # The scheduler
        self.ready = gauge("tinsmith_ready", "1 while commands are run, else 0.")
        self.engine_losses = read_counter(
            "tinsmith_engine_losses_total", "Times that the engine's own process ended by itself."
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
            "tinsmith_oldest_pending_seconds", "How long the oldest pending command has waited."
        )
        self.ledger_commits = read_counter(
            "tinsmith_ledger_commits_total", "Commits of the ledger since the start."
        )
        self.ledger_writes = read_counter(
            "tinsmith_ledger_writes_total", "Changes that were written in those commits."
        )
        self.ledger_bytes = gauge("tinsmith_ledger_bytes", "What the database takes on the disk.")
        self.payload_bytes = gauge(
            "tinsmith_payload_bytes", "Payloads and results that are kept, in bytes."
        )
        self.payload_files = gauge("tinsmith_payload_files", "Payloads that have a file each.")
        self.free_bytes = gauge("tinsmith_free_bytes", "Room on the disk of the data folder.")

        # The process
        gauge("tinsmith_build_info", "1, with the version.", "version").set(1, __version__)
        read_counter("process_cpu_seconds_total", "CPU time of the process.").read_with(
            time.process_time
        )
        gauge("process_resident_memory_bytes", "Memory of the process.").read_with(resident_bytes)
        gauge("process_open_fds", "Files and sockets that it has open.").read_with(open_files)
        gauge("process_start_time_seconds", "When it began, since the epoch.").set(_STARTED_AT)

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
