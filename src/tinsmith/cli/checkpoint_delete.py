"""`tinsmith checkpoint delete`: chooses, shows, asks, deletes, and says what became of each.

A few deletions are under way at a time. Whatever ends them early, failures or Ctrl-C, what is gone
and what is not is told.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import sys
from typing import Any

from tinsmith.cli.checkpoint import TYPES
from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.failures import CommandError, UsageError, in_short
from tinsmith.cli.output import plain_of, show
from tinsmith.cli.run import whole_run_id
from tinsmith.cli.text import counted, printable, time_text
from tinsmith.client.management.bulk_delete import CheckpointFilter
from tinsmith.client.rest import RestClient
from tinsmith.errors import NotFoundError
from tinsmith.observe.progress import Progress
from tinsmith.observe.sizes import size_text
from tinsmith.types.checkpoints import Checkpoint

AT_ONCE = 8


class Account:
    """What became of each checkpoint that was to be deleted."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.deleted: list[str] = []
        self.failed: dict[str, str] = {}

    @property
    def unknown(self) -> list[str]:
        """Those that we stopped waiting for."""
        return [path for path in self.paths if path not in {*self.deleted, *self.failed}]

    def plain(self) -> dict[str, Any]:
        """For programs."""
        return {
            "deleted_count": len(self.deleted),
            "failed": [{"tinker_path": path, "error": why} for path, why in self.failed.items()],
            "unknown": self.unknown,
        }

    def text(self) -> str:
        """For people."""
        lines = [f"Deleted {counted(len(self.deleted), 'checkpoint')}"]
        if self.failed:
            lines.append(f"Not deleted, because it failed: {len(self.failed)}")
            lines += [f"  {path}: {printable(why)}" for path, why in self.failed.items()]
        if self.unknown:
            lines.append(f"Not deleted, or not known: {len(self.unknown)}")
            lines += [f"  {path}" for path in self.unknown]
        return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    """Delete what was named or chosen.

    Raises:
        CommandError: Not all of it is deleted.
        UsageError: The choice is not clear.
    """
    _check(arguments)
    rest = rest_client(arguments)
    paths = list(dict.fromkeys(arguments.checkpoint_paths))
    found = None if paths else _chosen(rest, arguments)
    if found is not None:
        paths = [checkpoint.tinker_path for checkpoint in found]
    if arguments.dry_run:
        show(arguments.format, _dry(paths, found), _listing(paths, found, "Would delete"))
        return
    if not paths:
        show(arguments.format, Account([]).plain(), "There is nothing to delete")
        return
    if not arguments.yes:
        _ask(paths, found)
    account = Account(paths)
    try:
        _delete(rest, account, arguments, was_listed=found is not None)
    finally:
        show(arguments.format, account.plain(), account.text())
    if account.failed:
        raise CommandError(
            f"{len(account.failed)} of {counted(len(paths), 'checkpoint')} could not be deleted"
        )


def _check(arguments: argparse.Namespace) -> None:
    has_filter = arguments.checkpoint_type or arguments.before or arguments.after
    if arguments.checkpoint_paths and arguments.run_id:
        raise UsageError("give the paths of checkpoints or --run-id, not both")
    if not arguments.checkpoint_paths and not arguments.run_id:
        raise UsageError("give the paths of checkpoints, or --run-id")
    if has_filter and not arguments.run_id:
        raise UsageError("--type, --before and --after choose among those of a run: give --run-id")


def _chosen(rest: RestClient, arguments: argparse.Namespace) -> list[Checkpoint]:
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
    print("They cannot be brought back. Delete them? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    if answer not in ("y", "yes"):
        raise CommandError("nothing was deleted", remedy="answer y, or give --yes")


def _delete(
    rest: RestClient, account: Account, arguments: argparse.Namespace, *, was_listed: bool
) -> None:
    waiting = iter(account.paths)
    pending: dict[concurrent.futures.Future[None], str] = {}
    with Progress("Deleting", len(account.paths), format_=arguments.format) as bar:
        while True:
            for path in itertools.islice(waiting, AT_ONCE - len(pending)):
                pending[rest.delete_checkpoint_from_tinker_path(path)] = path
            if not pending:
                return
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                path, error = pending.pop(future), future.exception()
                # One that was listed and is not there now is gone: our first try may have done it,
                # and its reply been lost. One that was named may never have been there.
                if error is None or (was_listed and isinstance(error, NotFoundError)):
                    account.deleted.append(path)
                else:
                    account.failed[path] = in_short(error)
                bar.add(1)
