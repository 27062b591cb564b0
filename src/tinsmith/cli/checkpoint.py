"""`tinsmith checkpoint`: saved weights.

The verbs that take more than a call or two have modules of their own, named after them.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser, checkpoint_path, positive
from tinsmith.cli.run import add_limit, lora_text
from tinsmith.cli.text import moment_from, time_text, yes_or_no
from tinsmith.observe.sizes import size_text

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.types.checkpoints import Checkpoint, CheckpointType

# The names of types, and those that paths use for them.
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
    listing.add_argument("--run-id", metavar="ID", help="all checkpoints of this run")
    add_limit(listing, "checkpoints")
    for name, summary, run in (
        ("info", "show a checkpoint", show_checkpoint),
        ("publish", "let everybody read a checkpoint", publish),
        ("unpublish", "let nobody else read a checkpoint any more", unpublish),
    ):
        _add_path(parser.add_verb(name, summary, run))
    ttl = parser.add_verb("set-ttl", "say when a checkpoint expires", set_ttl)
    _add_path(ttl)
    when = ttl.add_mutually_exclusive_group(required=True)
    when.add_argument(
        "--ttl", type=positive, metavar="SECONDS", help="from now; an hour to ten years"
    )
    when.add_argument("--remove", action="store_true", help="never")
    _add_delete(parser)
    _add_download(parser)
    _add_merge(parser)
    _add_push(parser)
    _add_import(parser)
    _add_upload(parser)


def _add_path(verb: Parser) -> None:
    verb.add_argument(
        "checkpoint_path",
        type=checkpoint_path,
        help="its path, such as tinker://<run>/weights/<name>",
    )


def _add_delete(parser: Parser) -> None:
    delete = parser.add_verb(
        "delete",
        "delete checkpoints for good",
        run_delete,
        " Name them, or choose among those of a run.\n\nShows what will be deleted and asks first.",
    )
    delete.add_argument("checkpoint_paths", nargs="*", type=checkpoint_path, help="their paths")
    delete.add_argument("--run-id", metavar="ID", help="those of this run")
    delete.add_argument(
        "--type", choices=list(TYPES), dest="checkpoint_type", help="only of this type"
    )
    for name in ("before", "after"):
        delete.add_argument(
            f"--{name}",
            type=moment_from,
            metavar="TIME",
            help=f"only those saved {name} it (ISO 8601, in UTC unless it says otherwise)",
        )
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")
    delete.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


def _add_download(parser: Parser) -> None:
    download = parser.add_verb(
        "download",
        "download the files of a checkpoint",
        run_download,
        " They go into a new folder named after it.\n\nA download that was broken off goes on"
        " where it stopped when the command is run again.",
    )
    _add_path(download)
    download.add_argument("-o", "--output", metavar="DIR", help="where to make the folder")
    download.add_argument("--force", action="store_true", help="replace the folder if it exists")
    download.add_argument(
        "--no-resume", action="store_true", help="begin anew, and keep no part if it fails"
    )
    download.add_argument(
        "--connections",
        type=positive,
        default=8,
        metavar="N",
        help="how many to use at once (default 8)",
    )
    _add_use(download)


def _add_use(verb: Parser) -> None:
    """What the files are for, and what they call the base model."""
    from tinsmith.cli.serve import add_settings
    from tinsmith.serve.options import BY_NAME

    verb.add_argument(
        "--for",
        dest="use",
        choices=("peft", "vllm"),
        default="peft",
        help="peft: can be loaded and merged by peft (default). vllm: an output layer tied to"
        " the embedding stays LoRA, as vLLM needs it; peft must not merge that",
    )
    verb.add_argument(
        "--base-model",
        metavar="NAME_OR_FOLDER",
        help="what adapter_config.json names as the base model (default: its id on the hub, or the"
        " folder that the service loaded it from)",
    )
    add_settings(verb, (BY_NAME["data"],))


def _add_merge(parser: Parser) -> None:
    from tinsmith.cli.serve import add_settings
    from tinsmith.serve.options import BY_NAME

    merge = parser.add_verb(
        "merge",
        "make a full model of a checkpoint and its base model",
        run_merge,
        " The adapter is folded into the base model's weights: what comes out is loaded without"
        " LoRA.\nThe base model is fetched if it is not on this machine.",
    )
    merge.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="its path, such as tinker://<run>/weights/<name>, or a folder that peft saved",
    )
    merge.add_argument("-o", "--output", metavar="DIR", required=True, help="the folder to make")
    merge.add_argument(
        "--base-model",
        metavar="NAME_OR_FOLDER",
        help="by default the one that the checkpoint was trained on, by its name",
    )
    merge.add_argument("--force", action="store_true", help="replace the folder if it exists")
    add_settings(merge, (BY_NAME["data"],))


def _add_push(parser: Parser) -> None:
    push = parser.add_verb("push-hf", "upload a checkpoint to the Hugging Face Hub", run_push)
    _add_path(push)
    push.add_argument("-r", "--repo", metavar="ID", help="the repository; by default made up")
    push.add_argument("--public", action="store_true", help="let everybody read it")
    push.add_argument("--revision", metavar="NAME", help="the branch to upload to")
    push.add_argument("--commit-message", metavar="TEXT", help="of the upload")
    push.add_argument("--create-pr", action="store_true", help="as a pull request")
    for name, summary in (("allow", "upload only files like this"), ("ignore", "leave them out")):
        push.add_argument(
            f"--{name}-pattern", action="append", default=[], metavar="GLOB", help=summary
        )
    push.add_argument("--no-model-card", action="store_true", help="add no README.md")
    _add_use(push)


def _add_import(parser: Parser) -> None:
    from tinsmith.cli.serve import add_settings
    from tinsmith.serve.options import BY_NAME

    taken_in = parser.add_verb(
        "import",
        "make a checkpoint of an adapter that peft saved",
        run_import,
        " Works on the store and the database of a service of your own, which may run.",
    )
    taken_in.add_argument("folder", help="where adapter_config.json and the weights are")
    taken_in.add_argument("--name", help="what to call it; by default as the folder")
    taken_in.add_argument(
        "--base-model", metavar="NAME", help="what the service calls the model it was trained on"
    )
    taken_in.add_argument(
        "--tenant", default="default", metavar="NAME", help="whose it is (default: default)"
    )
    names = ("data", "database", "checkpoints", "models")
    add_settings(taken_in, tuple(BY_NAME[name] for name in names))


def _add_upload(parser: Parser) -> None:
    upload = parser.add_verb(
        "upload",
        "send an adapter that was made elsewhere, as a checkpoint",
        run_upload,
        " It is a folder that peft saved, with adapter_config.json and adapter_model.safetensors;"
        "\ntraining can go on from it. Only tinsmith's own service takes adapters.",
    )
    upload.add_argument("folder", metavar="PEFT_FOLDER", help="the adapter's folder")
    upload.add_argument("--name", default="imported", help="of the checkpoint; %(default)s")
    upload.add_argument(
        "--base-model",
        metavar="NAME",
        help="what the service calls it; by default as adapter_config.json says",
    )
    upload.add_argument("--project", metavar="ID", help="the project that it belongs to")
    upload.add_argument(
        "--ttl", type=positive, metavar="SECONDS", help="when it expires; by default never"
    )


def run_delete(arguments: argparse.Namespace) -> None:
    """See `checkpoint_delete`."""
    from tinsmith.cli import checkpoint_delete

    checkpoint_delete.run(arguments)


def run_upload(arguments: argparse.Namespace) -> None:
    """See `checkpoint_upload`."""
    from tinsmith.cli import checkpoint_upload

    checkpoint_upload.run(arguments)


def run_import(arguments: argparse.Namespace) -> None:
    """See `checkpoint_import`."""
    from tinsmith.cli import checkpoint_import

    checkpoint_import.run(arguments)


def run_download(arguments: argparse.Namespace) -> None:
    """See `checkpoint_download`."""
    from tinsmith.cli import checkpoint_download

    checkpoint_download.run(arguments)


def run_merge(arguments: argparse.Namespace) -> None:
    """See `checkpoint_merge`."""
    from tinsmith.cli import checkpoint_merge

    checkpoint_merge.run(arguments)


def run_push(arguments: argparse.Namespace) -> None:
    """See `checkpoint_push`."""
    from tinsmith.cli import checkpoint_push

    checkpoint_push.run(arguments)


def list_checkpoints(arguments: argparse.Namespace) -> None:
    """Show a run's checkpoints, or the newest of all."""
    from tinsmith.cli.connect import limit_s, rest_client, wait
    from tinsmith.cli.listing import page_size, taken, title_of
    from tinsmith.cli.output import Table, plain_of, show
    from tinsmith.cli.run import whole_run_id

    rest = rest_client(arguments)
    plain: dict[str, Any] = {}
    found: list[Checkpoint]
    if arguments.run_id:
        run_id = whole_run_id(rest, arguments.run_id, arguments)
        plain["run_id"] = run_id
        found = wait(rest.list_checkpoints(run_id), arguments).checkpoints
        title = f"{title_of(len(found), None, 'checkpoint')} for run {run_id}"
    else:
        pages = rest.iter_checkpoints(page_size(arguments.limit), timeout=limit_s(arguments))
        found = taken(pages, arguments, "checkpoints")
        title = title_of(len(found), pages.total_count, "checkpoint")
    show(
        arguments.format,
        {**plain, "checkpoints": [plain_of(checkpoint) for checkpoint in found]},
        Table(
            title,
            ["Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"],
            [_row(checkpoint) for checkpoint in found],
        ),
    )


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
    """Show all that is known of a checkpoint, with the adapter of its run."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.failures import CommandError
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
            f"the run {path.training_run_id} has no checkpoint {path.checkpoint_id}",
            remedy=f"`tinsmith checkpoint list --run-id {path.training_run_id}` shows what it has",
        )
    pairs = [
        ("Checkpoint ID", checkpoint.checkpoint_id),
        ("Type", checkpoint.checkpoint_type),
        ("Tinker Path", checkpoint.tinker_path),
        ("Size", size_text(checkpoint.size_bytes)),
        ("Public", yes_or_no(checkpoint.public)),
        ("Created", time_text(checkpoint.time)),
        ("Expires", _expiry(checkpoint)),
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
    done = "is public now" if is_public else "is private now"
    show(arguments.format, {"checkpoint_path": path, "public": is_public}, f"{path} {done}")


def set_ttl(arguments: argparse.Namespace) -> None:
    """Set or remove the time at which a checkpoint expires."""
    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import show

    path, ttl_s = arguments.checkpoint_path, arguments.ttl
    wait(rest_client(arguments).set_checkpoint_ttl_from_tinker_path(path, ttl_s), arguments)
    done = "never expires" if ttl_s is None else f"expires in {ttl_s} seconds"
    show(arguments.format, {"checkpoint_path": path, "ttl_seconds": ttl_s}, f"{path} {done}")
