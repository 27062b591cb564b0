"""Files: addresses of exported weights and archives, and the files themselves.

There are two ways to a file. A signed address (`tickets.py`) needs no credential, ends after a
while, and is good for one file of one tenant. With a key, files are at paths of ours that do not
end. Both give ranges, tags and `HEAD`.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

from tinsmith.checkpoints.archive import Archive
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import BadRequestError, CheckpointNotFoundError, NotFoundError
from tinsmith.ledger.records import CheckpointEntry, Session, TenantId
from tinsmith.server import ranges, tickets
from tinsmith.server.call import Answer, Call, Handler, StreamedReply
from tinsmith.server.listings import moment
from tinsmith.server.lookups import unknown
from tinsmith.server.routes.checkpoints import readable
from tinsmith.server.store_threads import StoreThreads
from tinsmith.server.tickets import Ticket
from tinsmith.server.traces import trace_pieces
from tinsmith.types.checkpoints import ExternalWeightsUrlsResponse
from tinsmith.types.record import Request
from tinsmith.types.runs import TraceExportResponse
from tinsmith.wire.endpoint_types import API_PREFIX, Endpoint
from tinsmith.wire.endpoint_types import Answer as Answers
from tinsmith.wire.exchange import HttpReply

FOLDER = "/downloads"
_EXTERNAL = "external_weights"
_RUN = "/tinsmith/training_runs/{training_run_id}"
_FILES = f"{API_PREFIX}{_RUN}/checkpoints/{{checkpoint_id:path}}"


class DownloadRequest(Request):
    """Fetch what a signed address gives."""

    ticket: str
    name: str


class FileRequest(Request):
    """Fetch a file of a checkpoint."""

    training_run_id: str
    checkpoint_id: str
    name: str


class ArchiveRequest(Request):
    """Fetch a checkpoint as one archive."""

    training_run_id: str
    checkpoint_id: str


# Addresses


async def get_external_weights_urls(call: Call) -> ExternalWeightsUrlsResponse:
    """Where the files of an exported checkpoint are."""
    path = CheckpointPath.of(call.request.training_run_id, call.request.checkpoint_id)
    entry = await readable(call, str(path))
    if path.kind != _EXTERNAL:
        raise BadRequestError(
            f"{path} was not saved for export; save it with save_weights_external first"
        )
    manifest = await _manifest(call, entry)
    expires_at = call.ledger.now() + tickets.LIFETIME_S
    urls = {
        file.name: _address(call, Ticket("file", call.tenant_id, str(path), file.name, expires_at))
        for file in manifest.files
    }
    return ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires_at))


async def get_checkpoint_archive_url(call: Call) -> HttpReply:
    """Where a checkpoint's archive is, as a redirect: that is what all SDKs with this call take."""
    path = CheckpointPath.of(call.request.training_run_id, call.request.checkpoint_id)
    entry = await readable(call, str(path))
    await _manifest(call, entry)
    expires_at = call.ledger.now() + tickets.LIFETIME_S
    name = archive_name(path)
    url = _address(call, Ticket("archive", call.tenant_id, str(path), name, expires_at))
    expires = email.utils.format_datetime(moment(expires_at), usegmt=True)
    return HttpReply(302, {"Location": url, "Expires": expires}, [])


async def export_session_trace(call: Call) -> TraceExportResponse:
    """Where a session's trace is. It is made when it is fetched, so it is always ready."""
    session = await call.service.lookups.session(call.tenant_id, call.request.session_id)
    expires_at = call.ledger.now() + tickets.LIFETIME_S
    ticket = Ticket("trace", call.tenant_id, session.id, f"{session.id}.json", expires_at)
    return TraceExportResponse(status="ready", url=_address(call, ticket))


def archive_name(path: CheckpointPath) -> str:
    """What an archive is called when it is saved."""
    return f"{path.run_id}-{path.name}.tar".replace(":", "-")


def _address(call: Call, ticket: Ticket) -> str:
    signed = tickets.sign(ticket, call.parts.secret)
    return f"{call.base_url}{FOLDER}/{signed}/{quote(ticket.name, safe='')}"


# Files


async def download(call: Call) -> Answer:
    """What a signed address gives."""
    request: DownloadRequest = call.request
    ticket = tickets.check(request.ticket, request.name, call.parts.secret, call.ledger.now())
    if ticket.kind == "trace":
        return await _trace(call, ticket)
    if ticket.kind not in ("file", "archive"):
        raise NotFoundError("there is no such file")
    asker = TenantId(ticket.tenant_id)
    entry = await call.service.lookups.readable_checkpoint(asker, ticket.target)
    if ticket.kind == "archive":
        return await _archive(call, entry)
    return await _file(call, entry, ticket.name)


async def download_checkpoint_file(call: Call) -> Answer:
    """A file of a checkpoint, for who has a key."""
    request: FileRequest = call.request
    path = CheckpointPath.of(request.training_run_id, request.checkpoint_id)
    return await _file(call, await readable(call, str(path)), request.name)


async def download_checkpoint_archive(call: Call) -> Answer:
    """A checkpoint as one archive, for who has a key."""
    request: ArchiveRequest = call.request
    path = CheckpointPath.of(request.training_run_id, request.checkpoint_id)
    return await _archive(call, await readable(call, str(path)))


async def _file(call: Call, entry: CheckpointEntry, name: str) -> Answer:
    manifest = await _manifest(call, entry)
    file = manifest.file(name)
    if file is None:
        raise unknown("file", name)
    found = ranges.Download(
        name=name, size_bytes=file.size_bytes, tag=f"{manifest.version}-{file.sha256[:16]}"
    )
    read = functools.partial(call.store.read, entry.files, name, version=manifest.version)
    return ranges.answer(
        found,
        call.headers,
        functools.partial(_pieces, call.service.store_threads, read),
        is_head=_is_head(call),
    )


async def _archive(call: Call, entry: CheckpointEntry) -> Answer:
    try:
        archive = await call.service.store_threads.run(Archive, call.store, entry.files)
    except CheckpointNotFoundError:
        raise unknown("checkpoint", entry.id) from None
    found = ranges.Download(
        name=archive_name(entry.files),
        size_bytes=archive.size_bytes,
        tag=archive.tag,
        content_type="application/x-tar",
    )
    pieces = functools.partial(_pieces, call.service.store_threads, archive.read)
    return ranges.answer(found, call.headers, pieces, is_head=_is_head(call))


async def _trace(call: Call, ticket: Ticket) -> Answer:
    session = await call.ledger.entries(Session).get(ticket.target)
    if session is None or session.tenant_id != ticket.tenant_id:
        raise unknown("session", ticket.target)
    headers = {
        "Content-Type": "application/json",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(ticket.name, safe='')}",
    }
    if _is_head(call):
        return HttpReply(200, headers, [])
    return StreamedReply(200, headers, trace_pieces(call.ledger, session))


async def _manifest(call: Call, entry: CheckpointEntry) -> Manifest:
    try:
        manifest: Manifest = await call.service.store_threads.run(call.store.info, entry.files)
    except CheckpointNotFoundError:
        raise unknown("checkpoint", entry.id) from None
    return manifest


async def _pieces(
    threads: StoreThreads, read: Callable[[int, int], Iterator[bytes]], start: int, stop: int
) -> AsyncIterator[bytes]:
    """What a store reads, piece by piece on a thread, and closed however this ends."""
    pieces: Any = await threads.run(read, start, stop)
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            reading = asyncio.create_task(threads.run(next, pieces, None))
            piece = await asyncio.shield(reading)
            if piece is None:
                return
            yield piece
    finally:
        if reading is not None:
            await asyncio.wait((reading,))  # the thread goes on when its client leaves
        await threads.run(pieces.close)


def _is_head(call: Call) -> bool:
    return call.endpoint.method == "HEAD"


def _gets(name: str, path: str, request: type[Request]) -> list[Endpoint]:
    """A GET and the HEAD that goes with it."""
    return [
        Endpoint(
            name=name if method == "GET" else f"{name}_head",
            method=method,
            path=path,
            request=request,
            answer=Answers.NOTHING,
            is_extension=True,
        )
        for method in ("GET", "HEAD")
    ]


FURTHER_ENDPOINTS = [
    *_gets("download", f"{FOLDER}/{{ticket}}/{{name}}", DownloadRequest),
    *_gets("download_checkpoint_file", f"{_FILES}/files/{{name}}", FileRequest),
    *_gets("download_checkpoint_archive", f"{_FILES}/archive.tar", ArchiveRequest),
]
OPEN = frozenset({"download", "download_head"})
HANDLERS: dict[str, Handler] = {
    "get_external_weights_urls": get_external_weights_urls,
    "get_checkpoint_archive_url": get_checkpoint_archive_url,
    "export_session_trace": export_session_trace,
    "download": download,
    "download_head": download,
    "download_checkpoint_file": download_checkpoint_file,
    "download_checkpoint_file_head": download_checkpoint_file,
    "download_checkpoint_archive": download_checkpoint_archive,
    "download_checkpoint_archive_head": download_checkpoint_archive,
}
