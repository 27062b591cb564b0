"""`tinsmith run`: training runs, listed and one by one."""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser, count
from tinsmith.cli.text import MISSING, time_text

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.types.checkpoints import Checkpoint
    from tinsmith.types.runs import TrainingRun

# Each column: its heading, what it shows, and its line in the help.
COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], str], str]] = {
    "id": ("Run ID", lambda run: run.training_run_id, "the run's id"),
    "model": ("Base Model", lambda run: run.base_model, "what it was trained from"),
    "owner": ("Owner", lambda run: run.model_owner, "whose it is"),
    "lora": ("LoRA", lambda run: lora_text(run.is_lora, run.lora_rank), "the adapter's rank"),
    "updated": ("Last Update", lambda run: time_text(run.last_request_time), "last request"),
    "status": ("Status", lambda run: "Failed" if run.corrupted else "OK", "OK or Failed"),
    "checkpoint": (
        "Last Checkpoint",
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "None",
        "its newest training checkpoint",
    ),
    "checkpoint_time": (
        "Checkpoint Time",
        lambda run: time_text(run.last_checkpoint.time) if run.last_checkpoint else MISSING,
        "when that was saved",
    ),
}
DEFAULT_COLUMNS = ["id", "model", "lora", "updated", "status"]


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
        default=DEFAULT_COLUMNS,
        metavar="NAMES",
        help=f"which columns to show, with commas (default {','.join(DEFAULT_COLUMNS)})",
    )
    info = parser.add_verb("info", "show a training run", show_run)
    info.add_argument("run_id", help="the run's id")


def add_limit(parser: Parser, what: str) -> None:
    """Add the option that says how much of a listing to show."""
    parser.add_argument(
        "--limit",
        type=count,
        default=20,
        metavar="N",
        help=f"show at most so many {what} (default 20; 0 for all)",
    )


def _columns(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no column {', '.join(map(repr, unknown))}; there are {', '.join(COLUMNS)}"
        )
    return names


def list_runs(arguments: argparse.Namespace) -> None:
    """Show the newest runs."""
    from tinsmith.cli.connect import limit_s, rest_client
    from tinsmith.cli.listing import page_size, taken, title_of
    from tinsmith.cli.output import Table, plain_of, show

    pages = rest_client(arguments).iter_training_runs(
        page_size=page_size(arguments.limit), timeout=limit_s(arguments)
    )
    runs: list[TrainingRun] = taken(pages, arguments, "runs")
    chosen = [COLUMNS[name] for name in arguments.columns]
    show(
        arguments.format,
        {"runs": [plain_of(run) for run in runs]},
        Table(
            title_of(len(runs), pages.total_count, "training run"),
            [heading for heading, _, _ in chosen],
            [[cell(run) for _, cell, _ in chosen] for run in runs],
        ),
    )


def show_run(arguments: argparse.Namespace) -> None:
    """Show all that is known of a run."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, plain_of, show

    run: TrainingRun = wait(rest_client(arguments).get_training_run(arguments.run_id), arguments)
    pairs = [
        ("Run ID", run.training_run_id),
        ("Base Model", run.base_model),
        ("Owner", run.model_owner),
        ("LoRA", lora_text(run.is_lora, run.lora_rank)),
        ("Last Update", time_text(run.last_request_time)),
        ("Status", "Failed" if run.corrupted else "OK"),
        *_checkpoint_pairs("Last Training Checkpoint", run.last_checkpoint),
        *_checkpoint_pairs("Last Sampler Checkpoint", run.last_sampler_checkpoint),
        *((f"Metadata {name}", value) for name, value in (run.user_metadata or {}).items()),
    ]
    show(arguments.format, plain_of(run), Properties(f"Training run {run.training_run_id}", pairs))


def _checkpoint_pairs(name: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    if checkpoint is None:
        return []
    return [
        (name, checkpoint.checkpoint_id),
        ("  Time", time_text(checkpoint.time)),
        ("  Path", checkpoint.tinker_path),
    ]


def lora_text(is_lora: bool, rank: int | None) -> str:
    """Whether it is an adapter, and of which rank."""
    return f"Rank {rank}" if is_lora and rank else "Yes" if is_lora else "No"
