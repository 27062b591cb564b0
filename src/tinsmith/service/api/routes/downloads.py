"""Downloads: links to exported weights and archives, and the files themselves.

There are two ways to a file. A signed link (`signed_links.py`) needs no credential, expires after
a while, and is valid for one file of one tenant. With a key, files are at permanent paths. Both
support ranges, entity tags and `HEAD`. A link to a file or archive in an S3 store redirects to the
store; that URL is made after the link and its tenant were checked.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

from tinsmith.checkpoints.archive import Archive, archive_url
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import BadRequestError, CheckpointNotFoundError, NotFoundError
from tinsmith.service.api import signed_links
from tinsmith.service.api.api_call import Answer, ApiCall, Handler, StreamedReply
from tinsmith.service.api.listings import moment
from tinsmith.service.api.lookups import unknown
from tinsmith.service.api.routes.checkpoints import readable
from tinsmith.service.api.signed_links import SignedLink
from tinsmith.service.api.store_threads import StoreThreads
from tinsmith.service.api.traces import trace_pieces
from tinsmith.service.ledger.records import CheckpointEntry, SessionEntry, TenantId
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
    """Fetch the target of a signed link."""

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


# Links


async def get_external_weights_urls(call: ApiCall) -> ExternalWeightsUrlsResponse:
    """Links to the files of an exported checkpoint."""
    path = CheckpointPath.of(call.request.training_run_id, call.request.checkpoint_id)
    entry = await readable(call, str(path))
    if path.kind != _EXTERNAL:
        raise BadRequestError(
            f"{path} was not saved for export; save it with save_weights_external first"
        )
    manifest = await _manifest(call, entry)
    expires_at = call.ledger.now() + signed_links.LIFETIME_S
    urls = {
        file.name: _address(
            call, SignedLink("file", call.tenant_id, str(path), file.name, expires_at)
        )
        for file in manifest.files
    }
    return ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires_at))


async def get_checkpoint_archive_url(call: ApiCall) -> HttpReply:
    """A link to a checkpoint's archive, as a redirect: all SDKs with this call expect one."""
    path = CheckpointPath.of(call.request.training_run_id, call.request.checkpoint_id)
    entry = await readable(call, str(path))
    await _manifest(call, entry)
    expires_at = call.ledger.now() + signed_links.LIFETIME_S
    name = archive_name(path)
    url = _address(call, SignedLink("archive", call.tenant_id, str(path), name, expires_at))
    expires = email.utils.format_datetime(moment(expires_at), usegmt=True)
    return HttpReply(302, {"Location": url, "Expires": expires}, [])


async def export_session_trace(call: ApiCall) -> TraceExportResponse:
    """A link to a session's trace. It is made when it is fetched, so it is always ready."""
    session = await call.context.lookups.session(call.tenant_id, call.request.session_id)
    expires_at = call.ledger.now() + signed_links.LIFETIME_S
    ticket = SignedLink("trace", call.tenant_id, session.id, f"{session.id}.json", expires_at)
    return TraceExportResponse(status="ready", url=_address(call, ticket))


def archive_name(path: CheckpointPath) -> str:
    """The file name of an archive."""
    return f"{path.run_id}-{path.name}.tar".replace(":", "-")


def _address(call: ApiCall, ticket: SignedLink) -> str:
    signed = signed_links.sign(ticket, call.context.secret)
    return f"{call.base_url}{FOLDER}/{signed}/{quote(ticket.name, safe='')}"


# Files


async def download(call: ApiCall) -> Answer:
    """The target of a signed link."""
    request: DownloadRequest = call.request
    ticket = signed_links.check(
        request.ticket, request.name, call.context.secret, call.ledger.now()
    )
    if ticket.kind == "trace":
        return await _trace(call, ticket)
    if ticket.kind not in ("file", "archive"):
        raise NotFoundError("there is no such file")
    asker = TenantId(ticket.tenant_id)
    entry = await call.context.lookups.readable_checkpoint(asker, ticket.target)
    if ticket.kind == "archive":
        return await _archive_at_store(call, entry) or await _archive(call, entry)
    return await _at_store(call, entry, ticket.name) or await _file(call, entry, ticket.name)


async def download_checkpoint_file(call: ApiCall) -> Answer:
    """A file of a checkpoint, for clients with a key."""
    request: FileRequest = call.request
    path = CheckpointPath.of(request.training_run_id, request.checkpoint_id)
    return await _file(call, await readable(call, str(path)), request.name)


async def download_checkpoint_archive(call: ApiCall) -> Answer:
    """A checkpoint as one archive, for clients with a key."""
    request: ArchiveRequest = call.request
    path = CheckpointPath.of(request.training_run_id, request.checkpoint_id)
    return await _archive(call, await readable(call, str(path)))


async def _at_store(call: ApiCall, entry: CheckpointEntry, name: str) -> HttpReply | None:
    """A redirect to the file in the store; None if it has to pass through here.

    For links only: a client with a key might send the key to the store as well.
    """
    if not call.context.settings.direct_downloads or _is_head(call):
        return None  # the URL would be signed for one method, and some clients change it
    manifest = await _manifest(call, entry)
    if manifest.file(name) is None:
        raise unknown("file", name)
    url = await call.context.store_threads.run(
        call.store.signed_url,
        entry.files,
        name,
        version=manifest.version,
        lifetime_s=signed_links.STORE_LIFETIME_S,
    )
    return _redirect(url)


async def _archive_at_store(call: ApiCall, entry: CheckpointEntry) -> HttpReply | None:
    """As `_at_store`, for the archive. The first request waits until the store has it."""
    if not call.context.settings.direct_downloads or _is_head(call):
        return None
    manifest = await _manifest(call, entry)
    try:
        url = await call.context.store_threads.run(
            archive_url,
            call.store,
            entry.files,
            version=manifest.version,
            lifetime_s=signed_links.STORE_LIFETIME_S,
            shown_as=archive_name(entry.files),
        )
    except CheckpointNotFoundError:
        raise unknown("checkpoint", entry.id) from None
    return _redirect(url)


def _redirect(url: str | None) -> HttpReply | None:
    if url is None:
        return None
    return HttpReply(307, {"Location": url, "Cache-Control": "no-store"}, [])


async def _file(call: ApiCall, entry: CheckpointEntry, name: str) -> Answer:
    manifest = await _manifest(call, entry)
    file = manifest.file(name)
    if file is None:
        raise unknown("file", name)
    found = signed_links.Download(
        name=name, size_bytes=file.size_bytes, tag=f"{manifest.version}-{file.sha256[:16]}"
    )
    read = functools.partial(call.store.read, entry.files, name, version=manifest.version)
    return signed_links.answer(
        found,
        call.headers,
        functools.partial(_pieces, call.context.store_threads, read),
        is_head=_is_head(call),
    )


async def _archive(call: ApiCall, entry: CheckpointEntry) -> Answer:
    try:
        archive = await call.context.store_threads.run(Archive, call.store, entry.files)
    except CheckpointNotFoundError:
        raise unknown("checkpoint", entry.id) from None
    found = signed_links.Download(
        name=archive_name(entry.files),
        size_bytes=archive.size_bytes,
        tag=archive.tag,
        content_type="application/x-tar",
    )
    pieces = functools.partial(_pieces, call.context.store_threads, archive.read)
    return signed_links.answer(found, call.headers, pieces, is_head=_is_head(call))


async def _trace(call: ApiCall, ticket: SignedLink) -> Answer:
    session = await call.ledger.entries(SessionEntry).get(ticket.target)
    if session is None or session.tenant_id != ticket.tenant_id:
        raise unknown("session", ticket.target)
    headers = {
        "Content-Type": "application/json",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(ticket.name, safe='')}",
    }
    if _is_head(call):
        return HttpReply(200, headers, [])
    return StreamedReply(200, headers, trace_pieces(call.ledger, session))


async def _manifest(call: ApiCall, entry: CheckpointEntry) -> Manifest:
    try:
        manifest: Manifest = await call.context.store_threads.run(call.store.info, entry.files)
    except CheckpointNotFoundError:
        raise unknown("checkpoint", entry.id) from None
    return manifest


async def _pieces(
    threads: StoreThreads, read: Callable[[int, int], Iterator[bytes]], start: int, stop: int
) -> AsyncIterator[bytes]:
    """What a store reads, piece by piece on a thread; closed in any case."""
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
            await asyncio.wait((reading,))  # the thread continues when its client leaves
        await threads.run(pieces.close)


def _is_head(call: ApiCall) -> bool:
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
