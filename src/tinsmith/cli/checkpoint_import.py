"""`tinsmith checkpoint import`: a peft adapter as a checkpoint of a service.

Uses the API's own calls: an upload is started, each file is sent to its signed URL, and the upload
is finished. The checkpoint gets its own run, which cannot be trained itself; training continues
from the checkpoint in a new run.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import IO, Any

import msgspec

from tinsmith.checkpoints.format import ADAPTER_CONFIG, ADAPTER_MODEL
from tinsmith.checkpoints.imported import read_foreign_config
from tinsmith.cli.command_errors import CommandError, UsageError
from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.fetch import MAX_ATTEMPTS, RETRY_S, SCHEME, TRANSIENT, opened
from tinsmith.cli.output import Properties, show
from tinsmith.errors import ExperimentalWarning
from tinsmith.observe.terminal import Progress, size_text
from tinsmith.wire.failures import detail_in

FILES = (ADAPTER_CONFIG, ADAPTER_MODEL)
FINISH_TIMEOUT_S = 1800.0
SEND_TIMEOUT_S = 600.0
"""The service stores a file before it answers, perhaps on another machine."""
_PIECE_BYTES = 1 << 20


def import_adapter(arguments: argparse.Namespace) -> None:
    """Import an adapter and show its path.

    Raises:
        CommandError: A file could not be sent.
        TinkerError: The folder has no adapter, or the service refused it.
    """
    folder = Path(arguments.folder)
    named, lora = read_foreign_config(folder)
    base_model = arguments.base_model or named
    if not base_model:
        raise UsageError(
            f"{folder / ADAPTER_CONFIG} names no base model", remedy="name it with --base-model"
        )
    rest = rest_client(arguments, is_record_only=False)
    sizes = {name: (folder / name).stat().st_size for name in FILES}
    with (
        warnings.catch_warnings(),
        Progress(
            "Uploading", sum(sizes.values()), in_bytes=True, format_=arguments.format
        ) as progress,
    ):
        warnings.simplefilter("ignore", ExperimentalWarning)
        started = wait(
            rest.external_weights_upload_start(
                base_model,
                lora,
                arguments.project,
                user_metadata=dict(arguments.metadata) or None,
            ),
            arguments,
        )
        for name, url in started.urls.items():
            if name not in sizes:
                raise CommandError(f"the service asks for {name!r:.80}, which {folder} has not")
            _send(folder / name, url, progress)
        finishing = rest.external_weights_upload_finish(started.upload_id)
        path = wait(finishing, arguments, FINISH_TIMEOUT_S).tinker_path
    if arguments.ttl is not None:
        wait(rest.set_checkpoint_ttl_from_tinker_path(path, arguments.ttl), arguments)
    size_bytes = sum(sizes.values())
    plain = {
        "checkpoint_path": path,
        "base_model": base_model,
        "lora_rank": lora.rank,
        "size_bytes": size_bytes,
    }
    pairs = [
        ("Checkpoint Path", path),
        ("Base Model", base_model),
        ("LoRA Rank", str(lora.rank)),
        ("Size", size_text(size_bytes)),
    ]
    show(arguments.format, plain, Properties("Checkpoint imported", pairs))


def _send(file: Path, url: str, progress: Progress) -> None:
    """Send a file to its signed URL, again if the connection breaks."""
    digest = base64.b64encode(_digest(file)).decode()
    headers = {
        "User-Agent": "tinsmith",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(file.stat().st_size),
        "Content-Digest": f"sha-256=:{digest}:",
    }
    for attempt in range(1, MAX_ATTEMPTS + 1):
        with file.open("rb") as content:
            body = _Counted(content, progress)
            try:
                _put(url, headers, body)
            except urllib.error.HTTPError as exc:
                body.take_back()
                detail = _detail(exc)
                if exc.code not in TRANSIENT or attempt == MAX_ATTEMPTS:
                    raise CommandError(
                        f"{file.name}: the server responded with status {exc.code}"
                        + (f": {detail}" if detail else ""),
                    ) from exc
            except (OSError, http.client.HTTPException) as exc:
                body.take_back()
                if attempt == MAX_ATTEMPTS:
                    raise CommandError(
                        f"{file.name} could not be sent: {exc}", remedy="run the command again"
                    ) from exc
            else:
                return
        time.sleep(RETRY_S * 2 ** (attempt - 1))


def _put(url: str, headers: dict[str, str], body: Any) -> None:
    if url.startswith(f"{SCHEME}://"):
        opened(url, headers, SEND_TIMEOUT_S, method="PUT", body=body).close()
        return
    if not url.startswith(("http://", "https://")):  # urllib would open files too
        raise CommandError(f"unsupported URL scheme {url.partition(':')[0]!r:.40}")
    request = urllib.request.Request(url, data=body, headers=headers, method="PUT")  # noqa: S310 - checked above
    urllib.request.urlopen(request, timeout=SEND_TIMEOUT_S).close()  # noqa: S310 - checked above


def _detail(refusal: urllib.error.HTTPError) -> str | None:
    """What the server says, if it is JSON; signed URLs may be of other servers."""
    with refusal:
        try:
            return detail_in(msgspec.json.decode(refusal.read(_PIECE_BYTES)))
        except (OSError, http.client.HTTPException, msgspec.DecodeError, RecursionError):
            return None


def _digest(file: Path) -> bytes:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


class _Counted:
    """A file that shows how much of it was read."""

    def __init__(self, content: IO[bytes], progress: Progress) -> None:
        self._content = content
        self._progress = progress
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        piece = self._content.read(size if size >= 0 else _PIECE_BYTES)
        self._read += len(piece)
        self._progress.add(len(piece))
        return piece

    def take_back(self) -> None:
        """Show it as not read."""
        self._progress.add(-self._read)
