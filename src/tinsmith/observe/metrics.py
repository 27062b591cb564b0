"""The metrics of a service, each with its name, in one place. docs/serving.md lists them.

A service has one `ServiceMetrics` and hands it to its parts, which count. What a part knows at any
moment anyway is read when the metrics are: `gauge.read_with`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tinsmith._version import __version__
from tinsmith.observe.instruments import SIZES, Registry

_STARTED_AT = time.time()


class ServiceMetrics:
    """Everything that is counted about one service."""

    def __init__(self) -> None:
        registry = self.registry = Registry()
        counter, gauge = registry.counter, registry.gauge
        histogram, read_counter = registry.histogram, registry.read_counter

        # The server
        self.http_requests = counter(
            "tinsmith_http_requests_total", "Requests that were answered.", "endpoint", "status"
        )
        self.http_seconds = histogram(
            "tinsmith_http_request_seconds",
            "From the first byte of a request to the last of its answer, long polls included.",
            "endpoint",
        )
        self.http_in_flight = gauge("tinsmith_http_in_flight", "Requests that are not answered.")
        self.http_received_bytes = counter(
            "tinsmith_http_received_bytes_total", "Bodies of requests, as they were sent."
        )
        self.long_polls = gauge("tinsmith_long_polls", "Polls that wait for a result.")
        self.unauthorised = counter(
            "tinsmith_unauthorised_total", "Requests without a key that is valid."
        )
        self.unknown_fields = counter(
            "tinsmith_unknown_fields_total",
            "Fields of requests that were ignored because they are not known.",
            "endpoint",
        )

        # Commands
        self.commands_accepted = counter(
            "tinsmith_commands_accepted_total", "Commands that are durable.", "kind"
        )
        self.commands_refused = counter(
            "tinsmith_commands_refused_total",
            "Commands that were refused before they were kept, by the status of the answer.",
            "kind",
            "status",
        )
        self.commands_settled = counter(
            "tinsmith_commands_settled_total",
            "Commands that ended: `done`, `failed` or `cancelled`.",
            "kind",
            "outcome",
        )
        self.command_wait_seconds = histogram(
            "tinsmith_command_wait_seconds", "From accepted to begun.", "kind"
        )
        self.command_seconds = histogram(
            "tinsmith_command_seconds", "From accepted to settled.", "kind"
        )
        self.commands_pending = gauge(
            "tinsmith_commands_pending",
            "Commands that are not settled: `pending`, `claimed`.",
            "state",
        )
        self.oldest_pending_seconds = gauge(
            "tinsmith_oldest_pending_seconds", "How long the oldest pending command has waited."
        )
        self.numbers_passed_over = counter(
            "tinsmith_numbers_passed_over_total",
            "Numbers of commands that never came and were waited for in vain.",
        )

        # The scheduler and the engine
        self.batches = counter("tinsmith_batches_total", "Batches that the engine ran.", "kind")
        self.batch_seconds = histogram(
            "tinsmith_batch_seconds", "How long a batch took the engine.", "kind"
        )
        self.batch_commands = histogram(
            "tinsmith_batch_commands",
            "Commands in a batch.",
            "kind",
            bounds=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )
        self.batch_tokens = histogram(
            "tinsmith_batch_tokens", "Tokens in a batch.", "kind", bounds=SIZES
        )
        self.tokens = counter(
            "tinsmith_tokens_total",
            "Tokens of settled commands, by the kinds of recorded usage.",
            "kind",
        )
        self.adapters = gauge("tinsmith_adapters", "Adapters that the engine holds.")
        self.snapshots = counter("tinsmith_snapshots_total", "Snapshots that were written.")
        self.snapshot_seconds = histogram(
            "tinsmith_snapshot_seconds", "How long a snapshot took to write."
        )
        self.replayed = counter(
            "tinsmith_commands_replayed_total", "Commands that were run again after a start."
        )

        # What there is
        self.sessions = gauge("tinsmith_sessions", "Sessions that have not ended.")
        self.sessions_lost = counter(
            "tinsmith_sessions_lost_total", "Sessions that were ended because they were silent."
        )
        self.checkpoint_bytes = gauge("tinsmith_checkpoint_bytes", "Saved checkpoints, in bytes.")

        # The ledger
        self.ledger_commits = read_counter(
            "tinsmith_ledger_commits_total", "Commits of the ledger since its start."
        )
        self.ledger_writes = read_counter(
            "tinsmith_ledger_writes_total", "Changes that were written in those commits."
        )
        self.ledger_bytes = gauge("tinsmith_ledger_bytes", "What the database takes on the disk.")
        self.payload_bytes = gauge(
            "tinsmith_payload_bytes", "Payloads and results that are kept, in bytes."
        )
        self.payload_files = gauge(
            "tinsmith_payload_files", "Payloads that are files of their own."
        )

        # The process
        self.ready = gauge("tinsmith_ready", "1 while new work is taken, else 0.")
        self.build = gauge("tinsmith_build_info", "1, with the version.", "version")
        self.build.set(1, __version__)
        read_counter("process_cpu_seconds_total", "CPU time of the server's process.").read_with(
            time.process_time
        )
        gauge("process_resident_memory_bytes", "Memory of the server's process.").read_with(
            resident_bytes
        )
        gauge("process_open_fds", "Files and sockets that the process has open.").read_with(
            open_files
        )
        gauge("process_start_time_seconds", "When the process began, since the epoch.").set(
            _STARTED_AT
        )

    def exposition(self) -> str:
        """All of them, as `/metrics` answers."""
        return self.registry.exposition()


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
