"""`tinsmith run`: list and inspect training runs."""

from __future__ import annotations

import argparse
import re

from tinsmith.cli.parser import Parser, count
from tinsmith.cli.text import MISSING, time_text

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tinsmith.client.rest import RestClient
    from tinsmith.types.checkpoints import Checkpoint
    from tinsmith.types.runs import TrainingRun

# Each column: its heading, its value, and its line in the help.
COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], str], str]] = {
    "id": ("Run ID", lambda run: run.training_run_id, "id of the run"),
    "name": (
        "Name",
        lambda run: name_of(run) or MISSING,
        "name in the metadata, or the session's",
    ),
    "model": ("Base Model", lambda run: run.base_model, "base model"),
    "owner": ("Owner", lambda run: run.model_owner, "owner"),
    "lora": ("LoRA", lambda run: lora_text(run.is_lora, run.lora_rank), "LoRA rank"),
    "steps": (
        "Step",
        lambda run: _number(run.steps),
        "optimizer steps, if reported",
    ),
    "loss": (
        "Loss/Token",
        lambda run: _number(run.loss_per_token),
        "last loss per token, if reported",
    ),
    "updated": (
        "Last Update",
        lambda run: time_text(run.last_request_time),
        "time of the last request",
    ),
    "status": ("Status", lambda run: "Failed" if run.corrupted else "OK", "OK or Failed"),
    "checkpoint": (
        "Last Checkpoint",
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "None",
        "newest training checkpoint",
    ),
    "checkpoint_time": (
        "Checkpoint Time",
        lambda run: time_text(run.last_checkpoint.time) if run.last_checkpoint else MISSING,
        "time of that checkpoint",
    ),
}
DEFAULT_COLUMNS = ["id", "name", "model", "lora", "steps", "loss", "updated", "status"]
_OPTIONAL: dict[str, Callable[[TrainingRun], object]] = {
    "name": lambda run: name_of(run) or None,
    "steps": lambda run: run.steps,
    "loss": lambda run: run.loss_per_token,
}
"""Default columns that are omitted if they are empty for all runs."""
_WHOLE_ID = re.compile(r"session-[0-9a-f]{32}:|[0-9a-f]{8}-[0-9a-f]{4}-")


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith run`."""
    listing = parser.add_verb("list", "list training runs, newest first", list_runs)
    add_limit(listing, "runs")
    known = "\n".join(f"  {name:16}{help_}" for name, (_, _, help_) in COLUMNS.items())
    listing.epilog = f"columns:\n{known}"
    listing.add_argument(
        "-c",
        "--columns",
        type=_columns,
        default=None,
        metavar="NAMES",
        help="columns to show, separated by commas; ids are shortened unless this is given "
        f"(default: {','.join(DEFAULT_COLUMNS)})",
    )
    info = parser.add_verb("info", "show the details of a training run", show_run)
    info.add_argument("run_id", help="id of the run, or its short form in `tinsmith run list`")


def add_limit(parser: Parser, what: str) -> None:
    """Add the option `--limit` to a listing."""
    parser.add_argument(
        "--limit",
        type=count,
        default=20,
        metavar="N",
        help=f"maximum number of {what} to show; 0 for all (default: 20)",
    )


def _columns(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown column {', '.join(map(repr, unknown))}: expected {', '.join(COLUMNS)}"
        )
    return names


def list_runs(arguments: argparse.Namespace) -> None:
    """Show the newest runs."""
    from tinsmith.cli.connect import limit_s, rest_client
    from tinsmith.cli.output import Table, fetch_items, listing_title, page_size, show

    pages = rest_client(arguments).iter_training_runs(
        page_size=page_size(arguments.limit), timeout=limit_s(arguments)
    )
    runs: list[TrainingRun] = fetch_items(pages, arguments, "runs")
    columns = dict(COLUMNS)
    names = arguments.columns
    if names is None:
        is_empty = {name: not any(map(has, runs)) for name, has in _OPTIONAL.items()}
        names = [name for name in DEFAULT_COLUMNS if not is_empty.get(name)]
        short = _short_ids(runs)
        columns["id"] = ("Run ID", lambda run: short[run.training_run_id], "")
    chosen = [columns[name] for name in names]
    show(
        arguments.format,
        {"runs": [_plain(run) for run in runs]},
        Table(
            listing_title(len(runs), pages.total_count, "training run"),
            [heading for heading, _, _ in chosen],
            [[cell(run) for _, cell, _ in chosen] for run in runs],
        ),
    )


def show_run(arguments: argparse.Namespace) -> None:
    """Show the details of a run."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, show

    rest = rest_client(arguments)
    run_id = whole_run_id(rest, arguments.run_id, arguments)
    run: TrainingRun = wait(rest.get_training_run(run_id), arguments)
    pairs = [
        ("Run ID", run.training_run_id),
        *([("Name", name_of(run))] if name_of(run) else []),
        ("Base Model", run.base_model),
        ("Owner", run.model_owner),
        ("LoRA", lora_text(run.is_lora, run.lora_rank)),
        ("Last Update", time_text(run.last_request_time)),
        ("Status", "Failed" if run.corrupted else "OK"),
        *([("Step", _number(run.steps))] if run.steps is not None else []),
        *([("Loss/Token", _number(run.loss_per_token))] if run.loss_per_token is not None else []),
        *_checkpoint_pairs("Last Training Checkpoint", run.last_checkpoint),
        *_checkpoint_pairs("Last Sampler Checkpoint", run.last_sampler_checkpoint),
        *((f"Metadata {name}", value) for name, value in (run.user_metadata or {}).items()),
    ]
    show(arguments.format, _plain(run), Properties(f"Training run {run.training_run_id}", pairs))


def whole_run_id(rest: RestClient, given: str, arguments: argparse.Namespace) -> str:
    """Expand the short id of a run, as shown by `run list`.

    Lists all runs, unless the id is complete. An id that matches no run is returned unchanged; the
    service will refuse it.

    Raises:
        CommandError: Several runs match.
    """
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.cli.connect import limit_s
    from tinsmith.types.runs import is_short_for

    if _WHOLE_ID.match(given):
        return given
    runs = rest.iter_training_runs(page_size=1000, timeout=limit_s(arguments))
    ids = [run.training_run_id for run in runs]
    found = [run_id for run_id in ids if is_short_for(given, run_id)]
    if given in ids or not found:
        return given
    if len(found) > 1:
        raise CommandError(
            f"{given!r} matches {len(found)} runs: {', '.join(found[:5])}",
            remedy="give more characters of the id",
        )
    return found[0]


def name_of(run: TrainingRun) -> str:
    """The name its owner gave to a run; empty if none."""
    return (run.user_metadata or {}).get("name") or run.display_name or ""


def _short_ids(runs: list[TrainingRun]) -> dict[str, str]:
    """The short form of each id, or the whole id if the short form is ambiguous."""
    from collections import Counter

    from tinsmith.types.runs import short_run_id

    short = {run.training_run_id: short_run_id(run.training_run_id) for run in runs}
    counts = Counter(short.values())
    return {whole: one if counts[one] == 1 else whole for whole, one in short.items()}


def _plain(run: TrainingRun) -> Any:
    from tinsmith.cli.output import plain_of

    plain = plain_of(run)
    for name in ("display_name", "steps", "loss_per_token"):
        if plain[name] is None:
            del plain[name]  # only tinsmith services report them
    return plain


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.6g}"


def _checkpoint_pairs(name: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    if checkpoint is None:
        return []
    return [
        (name, checkpoint.checkpoint_id),
        ("  Time", time_text(checkpoint.time)),
        ("  Path", checkpoint.tinker_path),
    ]


def lora_text(is_lora: bool, rank: int | None) -> str:
    """The LoRA rank, if it is a LoRA adapter."""
    return f"Rank {rank}" if is_lora and rank else "Yes" if is_lora else "No"
