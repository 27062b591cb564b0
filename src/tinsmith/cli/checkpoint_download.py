"""`tinsmith checkpoint download` and `merge`: a checkpoint as files on this machine.

Exported weights have a URL per file. Training and sampler checkpoints are downloaded as an archive.
If the service offers no archive of a training checkpoint, the checkpoint is loaded into a new model
and exported; the export is deleted after the download.

If the base model ties its output layer to the embedding, the adapter's output layer is converted
(`engine/files/output_layer.py`), so that peft merges it correctly.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from tinsmith.checkpoints.archive import give_peft_names
from tinsmith.checkpoints.format import ADAPTER_CONFIG, StoredAdapter, read_json
from tinsmith.checkpoints.imported import read_foreign
from tinsmith.cli.command_errors import CommandError, one_line, require_numpy
from tinsmith.cli.connect import limit_s, rest_client, service_client, wait
from tinsmith.cli.fetch import Fetch, SignedUrls
from tinsmith.cli.model import model_cache, progress_callback
from tinsmith.cli.output import Properties, show
from tinsmith.cli.partial_download import PartialDownload, exists_already, unpack
from tinsmith.client.rest import RestClient
from tinsmith.engine.files.find import find_model
from tinsmith.engine.files.merged import merge_adapter
from tinsmith.engine.files.output_layer import fold_output_layer, is_of_tied_layer
from tinsmith.errors import (
    APIStatusError,
    BaseModelError,
    CheckpointFormatError,
    ValidationError,
)
from tinsmith.observe.terminal import Progress, size_text
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.runs import WeightsInfoResponse

_log = logging.getLogger(__name__)

EXPORT_TTL_S = 3600
EXPORT_TIMEOUT_S = 600.0
ARCHIVE = "archive.tar"
# Statuses of a service that offers no archive. A 404 can also mean that the checkpoint does not
# exist, which the export will report.
_NO_ARCHIVE = frozenset({400, 404, 405, 410, 422, 501})


def download_checkpoint(arguments: argparse.Namespace) -> None:
    """Download a checkpoint.

    Raises:
        CommandError: The folder exists, or the download failed.
    """
    path = arguments.checkpoint_path
    # Run ids contain colons, which some file systems and `scp` do not allow.
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
    """Download a checkpoint into the new folder `target`, and return its size in bytes."""
    rest = rest_client(arguments)
    with PartialDownload(target, resume=resume) as staging:
        if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "external":
            _fetch(arguments, _exported(rest, arguments, path), staging)
        else:
            _from_archive(arguments, rest, path, staging)
        _adapt(arguments, staging.files)
        size = sum(path.stat().st_size for path in staging.files.rglob("*") if path.is_file())
        staging.place(staging.files, replace=arguments.force)
    return size


def _adapt(arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    """Apply `--base-model` and `--for` to a downloaded adapter."""
    config = folder / ADAPTER_CONFIG
    try:
        fields = read_json(config, dict[str, Any])
    except CheckpointFormatError:  # encrypted or not an adapter: keep it as it is
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
            f"{name} ties its output layer to the embedding, so converting this adapter for peft "
            "needs the base model's weights, which are not on this machine",
            remedy="pass their folder with --base-model, or use --for vllm to keep the adapter as "
            "it is; peft can then load it but not merge it",
        )
    require_numpy("converting the output layer")
    fold_output_layer(folder, base)


def _from_archive(
    arguments: argparse.Namespace, rest: RestClient, path: str, staging: PartialDownload
) -> None:
    def sign() -> tuple[dict[str, str], datetime.datetime | None]:
        signed = wait(rest.get_checkpoint_archive_url_from_tinker_path(path), arguments)
        return {ARCHIVE: signed.url}, signed.expires

    try:
        urls = SignedUrls(sign)
    except APIStatusError as error:
        if error.status_code not in _NO_ARCHIVE:
            raise
        if "/sampler_weights/" in path:
            raise CommandError(
                f"the service offers no archive of {path}: {one_line(error)}",
                remedy="download a training checkpoint (tinker://RUN/weights/NAME) instead",
            ) from error
        with _export(arguments, rest, path) as urls:
            _fetch(arguments, urls, staging)
        return
    _fetch(arguments, urls, staging)
    archive = (staging.files / ARCHIVE).rename(staging.folder / ARCHIVE)
    try:
        unpack(archive, staging.files)
        give_peft_names(staging.files)
    except BaseException:
        staging.clear()  # resuming a broken archive would fail again
        raise


def _fetch(arguments: argparse.Namespace, urls: SignedUrls, staging: PartialDownload) -> None:
    if not urls.names:
        raise CommandError("the checkpoint has no files")
    with Progress("Downloading", None, in_bytes=True, format_=arguments.format) as bar:
        fetch = Fetch(urls, staging, bar, connections=arguments.connections)
        fetch.run()


def _exported(
    rest: RestClient, arguments: argparse.Namespace, path: str, *, renew_ttl_s: int | None = None
) -> SignedUrls:
    """The URLs of exported weights; each request for URLs extends a temporary export's life."""

    def sign() -> tuple[dict[str, str], datetime.datetime | None]:
        signed = wait(rest.get_external_weights_urls(path), arguments)
        if renew_ttl_s is not None:
            wait(rest.set_checkpoint_ttl_from_tinker_path(path, renew_ttl_s), arguments)
        return signed.urls, signed.expires

    return SignedUrls(sign)


@contextlib.contextmanager
def _export(arguments: argparse.Namespace, rest: RestClient, path: str) -> Iterator[SignedUrls]:
    """Export a training checkpoint while the block runs."""
    label = "Exporting (this starts a training session)"
    with (
        service_client(arguments) as client,
        Progress(label, None, format_=arguments.format) as shown,
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
                    "could not delete the temporary export %s (%s); it expires in %d s",
                    exported,
                    one_line(error),
                    EXPORT_TTL_S,
                )


def merge_checkpoint(arguments: argparse.Namespace) -> None:
    """Merge a checkpoint of a service, or an adapter's folder, into its base model.

    Raises:
        CommandError: The target exists, or numpy is not installed.
        TinkerError: The merge failed; the target was not created.
    """
    target = pathlib.Path(arguments.output)
    if target.exists() and not arguments.force:
        raise exists_already(target)
    require_numpy("merging a checkpoint")
    adapter = _adapter(arguments)
    name = arguments.base_model or adapter.base_model
    with (
        Progress(name, None, in_bytes=True, format_=arguments.format) as bar,
        PartialDownload(target, resume=False) as staging,
    ):
        base = find_model(name, model_cache(arguments), report=progress_callback(bar, name))
        card = _model_card(arguments.checkpoint, name)
        merge_adapter(
            base, adapter, staging.files, report=progress_callback(bar, str(target)), card=card
        )
        size = sum(path.stat().st_size for path in staging.files.iterdir())
        staging.place(staging.files, replace=arguments.force)
    plain = {
        "checkpoint": arguments.checkpoint,
        "base_model": name,
        "destination": str(target),
        "file_size_bytes": size,
    }
    pairs = [
        ("Checkpoint", arguments.checkpoint),
        ("Base Model", name),
        ("Layers Changed", str(len(adapter.layers))),
        ("Total Size", size_text(size)),
        ("Merged to", str(target)),
    ]
    show(arguments.format, plain, Properties("Checkpoint merged", pairs))


def _adapter(arguments: argparse.Namespace) -> StoredAdapter:
    """The adapter in a folder, or that of a checkpoint, which is downloaded."""
    path = arguments.checkpoint
    if not path.startswith("tinker://"):
        return read_foreign(pathlib.Path(path), base_model=arguments.base_model)
    info: WeightsInfoResponse = wait(
        rest_client(arguments).get_weights_info_by_tinker_path(path), arguments
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "adapter"
        # Options of `download` that this command does not have.
        arguments.connections, arguments.use = 8, "vllm"
        download(arguments, path, folder, resume=False)
        return read_foreign(folder, base_model=info.base_model)


def _model_card(checkpoint: str, base_model: str) -> str:
    return f"""\
---
base_model: {base_model}
tags:
- tinker
---

# {base_model}, fine-tuned

The LoRA adapter `{checkpoint}` is merged into the weights.
Load the model like its base model.
"""
