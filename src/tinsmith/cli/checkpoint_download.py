"""`tinsmith checkpoint download`: the files of a checkpoint, in a folder of their own.

Exported weights have addresses of their own. A training or sampler checkpoint is asked for as an
archive; a service that makes none of a training checkpoint is made to export it: it is loaded into
a new model, saved for export, fetched, and the export deleted again.

Where the base model's output layer is its embedding, the folder gets the layer as a whole
(`model_files/output_layer.py`), so that `peft` merges the adapter rightly.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

from tinsmith.checkpoints.format import ADAPTER_CONFIG, read_json
from tinsmith.checkpoints.peft_names import give_peft_names
from tinsmith.cli.connect import limit_s, rest_client, service_client, wait
from tinsmith.cli.failures import CommandError, in_short, require_numpy
from tinsmith.cli.fetch import Addresses, Fetch
from tinsmith.cli.local_models import model_cache
from tinsmith.cli.output import Properties, show
from tinsmith.cli.staging import Staging, exists_already
from tinsmith.cli.unpack import unpack
from tinsmith.client.rest import RestClient
from tinsmith.errors import (
    APIStatusError,
    BaseModelError,
    CheckpointFormatError,
    ValidationError,
)
from tinsmith.model_files.find import find_model
from tinsmith.model_files.output_layer import fold_output_layer, is_of_tied_layer
from tinsmith.observe.progress import Progress
from tinsmith.observe.sizes import size_text
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath

_log = logging.getLogger(__name__)

EXPORT_TTL_S = 3600
EXPORT_TIMEOUT_S = 600.0
ARCHIVE = "archive.tar"
# Statuses of a service that makes no archive of this; 404 may also mean that nothing is there,
# which exporting it will tell.
_NO_ARCHIVE = frozenset({400, 404, 405, 410, 422, 501})


def run(arguments: argparse.Namespace) -> None:
    """Download a checkpoint.

    Raises:
        CommandError: The folder exists, or not everything could be fetched.
    """
    path = arguments.checkpoint_path
    # A colon, as in the ids of runs, is not in every file system, nor in every `scp` or PATH.
    name = path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    target = pathlib.Path(arguments.output or ".") / name
    if target.exists() and not arguments.force:
        raise exists_already(target)
    size = download(arguments, path, target, resume=not arguments.no_resume)
    plain = {"checkpoint_path": path, "destination": str(target), "file_size_bytes": size}
    pairs = [
        ("Checkpoint Path", path),
        ("Total Size", size_text(size)),
        ("Downloaded to", str(target)),
    ]
    show(arguments.format, plain, Properties("Checkpoint downloaded", pairs))


def download(
    arguments: argparse.Namespace, path: str, target: pathlib.Path, *, resume: bool
) -> int:
    """Make `target` a folder with the files of a checkpoint; returns their size in all."""
    rest = rest_client(arguments)
    with Staging(target, resume=resume) as staging:
        if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "external":
            _fetch(arguments, _exported(rest, arguments, path), staging)
        else:
            _from_archive(arguments, rest, path, staging)
        _suit(arguments, staging.files)
        size = sum(path.stat().st_size for path in staging.files.rglob("*") if path.is_file())
        staging.place(staging.files, replace=arguments.force)
    return size


def _suit(arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    """Name the base model as asked, and make the adapter one that its user can merge."""
    config = folder / ADAPTER_CONFIG
    try:
        fields = read_json(config, dict[str, Any])
    except CheckpointFormatError:  # encrypted, or no adapter: a download is not there to judge it
        return
    name = arguments.base_model or fields.get("base_model_name_or_path") or ""
    if arguments.base_model:
        fields["base_model_name_or_path"] = arguments.base_model
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if arguments.use != "peft":
        return
    base = None
    with contextlib.suppress(BaseModelError, ValidationError):
        base = find_model(name, model_cache(arguments), may_fetch=False)
    if not is_of_tied_layer(folder, base):
        return
    if base is None:
        raise CommandError(
            f"{name} has its embedding as output layer, so peft can merge this adapter only with "
            "the base model's own weights, which are not on this machine",
            remedy="--base-model FOLDER says where they are; --for vllm leaves the adapter as it "
            "is, which peft can load but not merge",
        )
    require_numpy("folding in the output layer")
    fold_output_layer(folder, base)


def _from_archive(
    arguments: argparse.Namespace, rest: RestClient, path: str, staging: Staging
) -> None:
    def sign() -> tuple[dict[str, str], datetime.datetime | None]:
        signed = wait(rest.get_checkpoint_archive_url_from_tinker_path(path), arguments)
        return {ARCHIVE: signed.url}, signed.expires

    try:
        addresses = Addresses(sign)
    except APIStatusError as error:
        if error.status_code not in _NO_ARCHIVE:
            raise
        if "/sampler_weights/" in path:
            raise CommandError(
                f"the service gives no archive of {path}: {in_short(error)}",
                remedy="training checkpoints (weights/…) can be exported and downloaded",
            ) from error
        with _export(arguments, rest, path) as addresses:
            _fetch(arguments, addresses, staging)
        return
    _fetch(arguments, addresses, staging)
    archive = (staging.files / ARCHIVE).rename(staging.folder / ARCHIVE)
    try:
        unpack(archive, staging.files)
        give_peft_names(staging.files)
    except BaseException:
        staging.clear()  # a broken archive is no better the next time
        raise


def _fetch(arguments: argparse.Namespace, addresses: Addresses, staging: Staging) -> None:
    if not addresses.names:
        raise CommandError("the checkpoint has no files")
    with Progress("Downloading", None, in_bytes=True, format_=arguments.format) as bar:
        fetch = Fetch(addresses, staging, bar, connections=arguments.connections)
        fetch.run()


def _exported(
    rest: RestClient, arguments: argparse.Namespace, path: str, *, renew_ttl_s: int | None = None
) -> Addresses:
    """The addresses of exported weights; those of a passing export live as long as we sign."""

    def sign() -> tuple[dict[str, str], datetime.datetime | None]:
        signed = wait(rest.get_external_weights_urls(path), arguments)
        if renew_ttl_s is not None:
            wait(rest.set_checkpoint_ttl_from_tinker_path(path, renew_ttl_s), arguments)
        return signed.urls, signed.expires

    return Addresses(sign)


@contextlib.contextmanager
def _export(arguments: argparse.Namespace, rest: RestClient, path: str) -> Iterator[Addresses]:
    """Have the service export a training checkpoint for as long as the block lasts."""
    note = "Exporting: this starts a training session on the checkpoint's base model"
    with (
        service_client(arguments) as client,
        Progress(note, None, format_=arguments.format) as shown,
    ):
        training = client.create_training_client_from_state(
            path,
            user_metadata={"created_by": "tinsmith checkpoint download"},
            timeout=limit_s(arguments, EXPORT_TIMEOUT_S),
        )
        saving = training.save_weights_external("download", ttl_seconds=EXPORT_TTL_S)
        exported = wait(saving, arguments, EXPORT_TIMEOUT_S).path
        shown.hide()
        try:
            yield _exported(rest, arguments, exported, renew_ttl_s=EXPORT_TTL_S)
        finally:
            error = rest.delete_checkpoint_from_tinker_path(exported).exception(EXPORT_TIMEOUT_S)
            if error is not None:
                _log.warning(
                    "the passing export %s could not be deleted (%s); it expires in %d s",
                    exported,
                    in_short(error),
                    EXPORT_TTL_S,
                )
