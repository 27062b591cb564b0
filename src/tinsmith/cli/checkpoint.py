"""`tinsmith checkpoint`: list, inspect, publish and expire checkpoints.

Verbs that move files or delete in bulk are in `checkpoint_*.py`, imported when they run.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser, checkpoint_path, metadata_pair, positive
from tinsmith.cli.run import add_limit, lora_text
from tinsmith.cli.text import moment_from, time_text, yes_or_no
from tinsmith.observe.terminal import size_text

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.client.rest import RestClient
    from tinsmith.types.checkpoints import Checkpoint, CheckpointType

_LARGEST_SEARCH = 200
# Checkpoint types, also by the names used in paths.
TYPES: dict[str, CheckpointType] = {
    "training": "training",
    "sampler": "sampler",
    "external": "external",
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith checkpoint`."""
    listing = parser.add_verb("list", "list checkpoints, newest first", list_checkpoints)
    listing.add_argument(
        "--run-id", metavar="ID", help="only checkpoints of this run (all of them)"
    )
    add_limit(listing, "checkpoints")
    _add_metadata(listing, "only checkpoints with this metadata (repeatable; all must match)")
    listing.add_argument(
        "--base-model",
        action="append",
        metavar="NAME",
        help="only checkpoints of this base model (repeatable; any may match)",
    )
    listing.add_argument(
        "--project",
        action="append",
        metavar="ID",
        help="only checkpoints in this project (repeatable; any may match)",
    )
    listing.add_argument(
        "--type", choices=list(TYPES), dest="checkpoint_type", help="only this type"
    )
    for name, summary, run in (
        ("info", "show the details of a checkpoint", show_checkpoint),
        ("publish", "make a checkpoint public", publish),
        ("unpublish", "make a checkpoint private", unpublish),
    ):
        _add_path(parser.add_verb(name, summary, run))
    ttl = parser.add_verb("set-ttl", "set when a checkpoint expires", set_ttl)
    _add_path(ttl)
    when = ttl.add_mutually_exclusive_group(required=True)
    when.add_argument(
        "--ttl", type=positive, metavar="SECONDS", help="seconds from now: one hour to ten years"
    )
    when.add_argument("--remove", action="store_true", help="never expire")
    _add_delete(parser)
    _add_download(parser)
    _add_merge(parser)
    _add_push(parser)
    _add_import(parser)


def _add_path(verb: Parser) -> None:
    verb.add_argument(
        "checkpoint_path",
        type=checkpoint_path,
        help="path, such as tinker://RUN/weights/NAME",
    )


def _add_delete(parser: Parser) -> None:
    delete = parser.add_verb(
        "delete",
        "delete checkpoints permanently",
        "tinsmith.cli.checkpoint_delete:delete",
        " Give their paths, or select them with --run-id. Lists them and asks for confirmation."
        "\n\nexample: tinsmith checkpoint delete --run-id ID --before 2026-01-01 --dry-run",
    )
    delete.add_argument(
        "checkpoint_paths", nargs="*", type=checkpoint_path, help="paths of checkpoints"
    )
    delete.add_argument("--run-id", metavar="ID", help="select checkpoints of this run")
    delete.add_argument(
        "--type", choices=list(TYPES), dest="checkpoint_type", help="only this type"
    )
    for name in ("before", "after"):
        delete.add_argument(
            f"--{name}",
            type=moment_from,
            metavar="TIME",
            help=f"only checkpoints saved {name} this ISO 8601 time (UTC unless it has an offset)",
        )
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    delete.add_argument(
        "--dry-run", action="store_true", help="list what would be deleted, and exit"
    )


def _add_download(parser: Parser) -> None:
    download = parser.add_verb(
        "download",
        "download a checkpoint",
        "tinsmith.cli.checkpoint_download:download_checkpoint",
        " The files go into a new folder named after the checkpoint.\nRun the command again to"
        " resume an interrupted download.",
    )
    _add_path(download)
    download.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="parent of the new folder (default: current directory)",
    )
    download.add_argument("--force", action="store_true", help="replace the folder if it exists")
    download.add_argument(
        "--no-resume", action="store_true", help="start over, and keep nothing if it fails"
    )
    download.add_argument(
        "--connections",
        type=positive,
        default=8,
        metavar="N",
        help="number of parallel connections (default: 8)",
    )
    _add_adapter_options(download)


def _add_adapter_options(verb: Parser) -> None:
    """Add the options that adapt an adapter to its user."""
    from tinsmith.cli.serve import add_settings
    from tinsmith.service.run.options import BY_NAME

    verb.add_argument(
        "--for",
        dest="use",
        choices=("peft", "vllm"),
        default="peft",
        help="peft (default): peft can load and merge the adapter. vllm: LoRA weights of a tied"
        " output layer stay LoRA, as vLLM requires; peft must not merge them",
    )
    verb.add_argument(
        "--base-model",
        metavar="NAME_OR_FOLDER",
        help="base model to name in adapter_config.json (default: its Hub id, or the folder that"
        " the service loaded it from)",
    )
    add_settings(verb, (BY_NAME["data"],))


def _add_merge(parser: Parser) -> None:
    from tinsmith.cli.serve import add_settings
    from tinsmith.service.run.options import BY_NAME

    merge = parser.add_verb(
        "merge",
        "merge a checkpoint into its base model",
        "tinsmith.cli.checkpoint_download:merge_checkpoint",
        " The result is a full model that loads without LoRA.\nThe base model is downloaded if it"
        " is not on this machine.\n\nexample: tinsmith checkpoint merge tinker://RUN/weights/NAME"
        " -o merged",
    )
    merge.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="path, such as tinker://RUN/weights/NAME, or a folder saved by peft",
    )
    merge.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to create")
    merge.add_argument(
        "--base-model",
        metavar="NAME_OR_FOLDER",
        help="base model (default: the one that the checkpoint was trained on)",
    )
    merge.add_argument("--force", action="store_true", help="replace the folder if it exists")
    add_settings(merge, (BY_NAME["data"],))


def _add_push(parser: Parser) -> None:
    push = parser.add_verb(
        "push-hf",
        "upload a checkpoint to the Hugging Face Hub",
        "tinsmith.cli.checkpoint_push:push",
    )
    _add_path(push)
    push.add_argument(
        "-r", "--repo", metavar="ID", help="repository (default: derived from the checkpoint)"
    )
    push.add_argument("--public", action="store_true", help="create a public repository")
    push.add_argument("--revision", metavar="NAME", help="branch to upload to")
    push.add_argument("--commit-message", metavar="TEXT", help="message of the commit")
    push.add_argument(
        "--create-pr", action="store_true", help="open a pull request instead of committing"
    )
    for name, summary in (
        ("allow", "upload only matching files"),
        ("ignore", "skip matching files"),
    ):
        push.add_argument(
            f"--{name}-pattern", action="append", default=[], metavar="GLOB", help=summary
        )
    push.add_argument("--no-model-card", action="store_true", help="do not add a README.md")
    _add_adapter_options(push)


def _add_import(parser: Parser) -> None:
    imported = parser.add_verb(
        "import",
        "import a peft adapter as a checkpoint",
        "tinsmith.cli.checkpoint_import:import_adapter",
        " The folder must contain adapter_config.json and adapter_model.safetensors. You can sample"
        " from the checkpoint and continue training from it.\n\nexample: tinsmith checkpoint import"
        " ./my-adapter --metadata task=chat",
    )
    imported.add_argument("folder", metavar="PEFT_FOLDER", help="folder saved by peft")
    imported.add_argument(
        "--base-model",
        metavar="NAME",
        help="the service's name for the base model (default: as in adapter_config.json)",
    )
    imported.add_argument("--project", metavar="ID", help="project of the checkpoint")
    imported.add_argument(
        "--ttl", type=positive, metavar="SECONDS", help="expire after this time (default: never)"
    )
    _add_metadata(imported, "metadata of the checkpoint (repeatable)")


def _add_metadata(verb: Parser, summary: str) -> None:
    verb.add_argument(
        "--metadata",
        action="append",
        default=[],
        type=metadata_pair,
        metavar="KEY=VALUE",
        help=summary,
    )


def list_checkpoints(arguments: argparse.Namespace) -> None:
    """Show a run's checkpoints, those that match, or the newest of all."""
    from tinsmith.cli.command_errors import UsageError
    from tinsmith.cli.connect import limit_s, rest_client, wait
    from tinsmith.cli.output import (
        Table,
        fetch_items,
        listing_title,
        page_size,
        plain_of,
        show,
    )
    from tinsmith.cli.run import whole_run_id

    is_search = bool(
        arguments.metadata or arguments.base_model or arguments.project or arguments.checkpoint_type
    )
    if is_search and arguments.run_id:
        raise UsageError(
            "--run-id cannot be combined with --metadata, --base-model, --project or --type"
        )
    rest = rest_client(arguments)
    plain: dict[str, Any] = {}
    found: list[Checkpoint]
    if is_search:
        found, has_more = _search(rest, arguments)
        more = " (there are more; use --limit to show them)" if has_more else ""
        title = listing_title(len(found), None, "checkpoint") + more
    elif arguments.run_id:
        run_id = whole_run_id(rest, arguments.run_id, arguments)
        plain["run_id"] = run_id
        found = wait(rest.list_checkpoints(run_id), arguments).checkpoints
        title = f"{listing_title(len(found), None, 'checkpoint')} for run {run_id}"
    else:
        pages = rest.iter_checkpoints(page_size(arguments.limit), timeout=limit_s(arguments))
        found = fetch_items(pages, arguments, "checkpoints")
        title = listing_title(len(found), pages.total_count, "checkpoint")
    show(
        arguments.format,
        {**plain, "checkpoints": [plain_of(checkpoint) for checkpoint in found]},
        Table(
            title,
            ["Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"],
            [_row(checkpoint) for checkpoint in found],
        ),
    )


def _search(rest: RestClient, arguments: argparse.Namespace) -> tuple[list[Checkpoint], bool]:
    """The newest `--limit` checkpoints that match, and whether there are more."""
    import warnings

    from tinsmith.cli.connect import wait
    from tinsmith.errors import ExperimentalWarning
    from tinsmith.types.requests import CheckpointSearchRequest

    found: list[Checkpoint] = []
    cursor = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        while True:
            left = arguments.limit - len(found) if arguments.limit else _LARGEST_SEARCH
            request = CheckpointSearchRequest(
                project_ids=arguments.project,
                user_metadata=dict(arguments.metadata),
                checkpoint_type=TYPES.get(arguments.checkpoint_type),
                base_models=arguments.base_model,
                limit=min(left, _LARGEST_SEARCH),
                cursor=cursor,
            )
            page = wait(rest.search_checkpoints(request), arguments)
            found += page.checkpoints
            cursor = page.next_cursor
            if cursor is None or len(found) == arguments.limit:
                return found, cursor is not None


def _row(checkpoint: Checkpoint) -> list[str]:
    return [
        checkpoint.checkpoint_id,
        checkpoint.checkpoint_type,
        size_text(checkpoint.size_bytes),
        yes_or_no(checkpoint.public),
        time_text(checkpoint.time),
        _expiry(checkpoint),
        checkpoint.tinker_path,
    ]


def _expiry(checkpoint: Checkpoint) -> str:
    return time_text(checkpoint.expires_at) if checkpoint.expires_at else "Never"


def show_checkpoint(arguments: argparse.Namespace) -> None:
    """Show the details of a checkpoint, including the LoRA rank of its run."""
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, plain_of, show
    from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath

    path = ParsedCheckpointTinkerPath.from_tinker_path(arguments.checkpoint_path)
    rest = rest_client(arguments)
    listing = rest.list_checkpoints(path.training_run_id)
    run = wait(rest.get_training_run(path.training_run_id), arguments)
    checkpoints: list[Checkpoint] = wait(listing, arguments).checkpoints
    named = (found for found in checkpoints if found.tinker_path == arguments.checkpoint_path)
    checkpoint = next(named, None)
    if checkpoint is None:
        raise CommandError(
            f"run {path.training_run_id} has no checkpoint {path.checkpoint_id}",
            remedy=f"run `tinsmith checkpoint list --run-id {path.training_run_id}` to see them",
        )
    pairs = [
        ("Checkpoint ID", checkpoint.checkpoint_id),
        ("Type", checkpoint.checkpoint_type),
        ("Tinker Path", checkpoint.tinker_path),
        ("Size", size_text(checkpoint.size_bytes)),
        ("Public", yes_or_no(checkpoint.public)),
        ("Created", time_text(checkpoint.time)),
        ("Expires", _expiry(checkpoint)),
        ("Base Model", checkpoint.base_model or run.base_model),
        ("Training Run ID", path.training_run_id),
        ("LoRA", lora_text(run.is_lora, run.lora_rank)),
        *((f"Metadata {name}", value) for name, value in (checkpoint.user_metadata or {}).items()),
    ]
    plain = {**plain_of(checkpoint), "is_lora": run.is_lora, "lora_rank": run.lora_rank}
    show(arguments.format, plain, Properties(f"Checkpoint {checkpoint.checkpoint_id}", pairs))


def publish(arguments: argparse.Namespace) -> None:
    """Make a checkpoint public."""
    _set_public(arguments, True)


def unpublish(arguments: argparse.Namespace) -> None:
    """Make a checkpoint private."""
    _set_public(arguments, False)


def _set_public(arguments: argparse.Namespace, is_public: bool) -> None:
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import show

    rest, path = rest_client(arguments), arguments.checkpoint_path
    change = (
        rest.publish_checkpoint_from_tinker_path
        if is_public
        else rest.unpublish_checkpoint_from_tinker_path
    )
    wait(change(path), arguments)
    state = "is now public" if is_public else "is now private"
    show(arguments.format, {"checkpoint_path": path, "public": is_public}, f"{path} {state}")


def set_ttl(arguments: argparse.Namespace) -> None:
    """Set or remove the expiry time of a checkpoint."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import show

    path, ttl_s = arguments.checkpoint_path, arguments.ttl
    wait(rest_client(arguments).set_checkpoint_ttl_from_tinker_path(path, ttl_s), arguments)
    state = "never expires" if ttl_s is None else f"expires in {ttl_s} seconds"
    show(arguments.format, {"checkpoint_path": path, "ttl_seconds": ttl_s}, f"{path} {state}")
