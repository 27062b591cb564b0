"""`tinsmith checkpoint delete`: select, confirm, delete, and report the outcome of each.

A few deletions run concurrently. The report is printed even after failures or Ctrl-C.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import sys
from typing import Any

from tinsmith.cli.checkpoint import TYPES
from tinsmith.cli.command_errors import CommandError, UsageError, one_line
from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.output import plain_of, show
from tinsmith.cli.run import whole_run_id
from tinsmith.cli.text import counted, printable, time_text
from tinsmith.client.management.checkpoints import CheckpointFilter
from tinsmith.client.rest import RestClient
from tinsmith.errors import NotFoundError
from tinsmith.observe.terminal import Progress, size_text
from tinsmith.types.checkpoints import Checkpoint

CONCURRENCY = 8


class DeletionTally:
    """The outcome of each deletion."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.deleted: list[str] = []
        self.failed: dict[str, str] = {}

    @property
    def unknown(self) -> list[str]:
        """Checkpoints whose deletion had not finished."""
        return [path for path in self.paths if path not in {*self.deleted, *self.failed}]

    def plain(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "deleted_count": len(self.deleted),
            "failed": [{"tinker_path": path, "error": why} for path, why in self.failed.items()],
            "unknown": self.unknown,
        }

    def text(self) -> str:
        """The report as text."""
        lines = [f"Deleted {counted(len(self.deleted), 'checkpoint')}"]
        if self.failed:
            lines.append(f"Failed to delete {counted(len(self.failed), 'checkpoint')}")
            lines += [f"  {path}: {printable(why)}" for path, why in self.failed.items()]
        if self.unknown:
            lines.append(f"Interrupted: {counted(len(self.unknown), 'checkpoint')} may still exist")
            lines += [f"  {path}" for path in self.unknown]
        return "\n".join(lines)


def delete(arguments: argparse.Namespace) -> None:
    """Delete the given or selected checkpoints.

    Raises:
        CommandError: Some could not be deleted.
        UsageError: The selection is ambiguous or missing.
    """
    _check(arguments)
    rest = rest_client(arguments)
    paths = list(dict.fromkeys(arguments.checkpoint_paths))
    found = None if paths else _select(rest, arguments)
    if found is not None:
        paths = [checkpoint.tinker_path for checkpoint in found]
    if arguments.dry_run:
        show(arguments.format, _dry(paths, found), _listing(paths, found, "Would delete"))
        return
    if not paths:
        show(arguments.format, DeletionTally([]).plain(), "Nothing to delete")
        return
    if not arguments.yes:
        _ask(paths, found)
    tally = DeletionTally(paths)
    try:
        _delete(rest, tally, arguments, was_listed=found is not None)
    finally:
        show(arguments.format, tally.plain(), tally.text())
    if tally.failed:
        raise CommandError(
            f"failed to delete {len(tally.failed)} of {counted(len(paths), 'checkpoint')}"
        )


def _check(arguments: argparse.Namespace) -> None:
    has_filter = arguments.checkpoint_type or arguments.before or arguments.after
    if arguments.checkpoint_paths and arguments.run_id:
        raise UsageError("give either checkpoint paths or --run-id, not both")
    if not arguments.checkpoint_paths and not arguments.run_id:
        raise UsageError("give checkpoint paths or --run-id")
    if has_filter and not arguments.run_id:
        raise UsageError("--type, --before and --after require --run-id")


def _select(rest: RestClient, arguments: argparse.Namespace) -> list[Checkpoint]:
    wanted = CheckpointFilter(
        checkpoint_type=TYPES.get(arguments.checkpoint_type),
        before=arguments.before,
        after=arguments.after,
    )
    run_id = whole_run_id(rest, arguments.run_id, arguments)
    listing = wait(rest.list_checkpoints(run_id), arguments)
    return [checkpoint for checkpoint in listing.checkpoints if wanted.fits(checkpoint)]


def _dry(paths: list[str], found: list[Checkpoint] | None) -> dict[str, Any]:
    shown = [{"tinker_path": path} for path in paths] if found is None else map(plain_of, found)
    return {"would_delete": list(shown)}


def _listing(paths: list[str], found: list[Checkpoint] | None, what: str) -> str:
    lines = [f"{what} {counted(len(paths), 'checkpoint')}"]
    if found is None:
        return "\n".join([*lines, *(f"  {printable(path)}" for path in paths)])
    lines += [
        f"  {printable(checkpoint.tinker_path)}"
        f" ({size_text(checkpoint.size_bytes)}, saved {time_text(checkpoint.time)})"
        for checkpoint in found
    ]
    total = sum(checkpoint.size_bytes or 0 for checkpoint in found)
    return "\n".join([*lines, f"Total size: {size_text(total)}"])


def _ask(paths: list[str], found: list[Checkpoint] | None) -> None:
    # On stderr: stdout is for the result.
    print(_listing(paths, found, "This will delete"), file=sys.stderr)
    print("This cannot be undone. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    if answer not in ("y", "yes"):
        raise CommandError("nothing was deleted", remedy="answer y, or pass --yes")


def _delete(
    rest: RestClient, tally: DeletionTally, arguments: argparse.Namespace, *, was_listed: bool
) -> None:
    waiting = iter(tally.paths)
    pending: dict[concurrent.futures.Future[None], str] = {}
    with Progress("Deleting", len(tally.paths), format_=arguments.format) as bar:
        while True:
            for path in itertools.islice(waiting, CONCURRENCY - len(pending)):
                pending[rest.delete_checkpoint_from_tinker_path(path)] = path
            if not pending:
                return
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                path, error = pending.pop(future), future.exception()
                # A listed checkpoint that is not found was deleted, perhaps by an attempt whose
                # response was lost. One given by its path may never have existed.
                if error is None or (was_listed and isinstance(error, NotFoundError)):
                    tally.deleted.append(path)
                else:
                    tally.failed[path] = one_line(error)
                bar.add(1)
