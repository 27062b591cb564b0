"""Sending an adapter that was made elsewhere, in parts, to a service that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tinsmith.client.session import Session
from tinsmith.errors import ValidationError
from tinsmith.types.imports import (
    IMPORTED_FILES,
    BeginImportRequest,
    BeginImportResponse,
    FinishImportRequest,
    FinishImportResponse,
    ImportPartRequest,
)
from tinsmith.wire.exchange import bytes_request, to_http
from tinsmith.wire.import_endpoints import BEGIN_IMPORT, FINISH_IMPORT, SEND_IMPORT_PART

Told = Callable[[int], None]
"""Is told how many bytes were sent."""


async def import_folder(
    session: Session,
    folder: Path,
    name: str,
    *,
    base_model: str | None = None,
    project_id: str | None = None,
    ttl_seconds: int | None = None,
    sent: Told = lambda _: None,
) -> FinishImportResponse:
    """Send the adapter in a folder and have it made a checkpoint.

    Args:
        session: Of a client that is ready.
        folder: Where `peft` saved it.
        name: What the checkpoint is to be called.
        base_model: What the service calls it; None takes the adapter's word for it.
        project_id: Where it belongs to.
        ttl_seconds: When it expires; None means never.
        sent: Told of the progress.

    Raises:
        ValidationError: There is no adapter in the folder, or the service takes none.
        APIError: The service refused it; the message says why.
    """
    sizes = _sizes(folder)
    most = session.flags.tinsmith_import_bytes
    if not most:
        raise ValidationError("this service takes no adapters that were made elsewhere")
    if sizes[IMPORTED_FILES[1]] > most:
        raise ValidationError(
            f"{IMPORTED_FILES[1]} has {sizes[IMPORTED_FILES[1]]} bytes; this service takes {most}"
        )
    request = BeginImportRequest(
        name=name,
        files=sizes,
        base_model=base_model,
        project_id=project_id,
        ttl_seconds=ttl_seconds,
    )
    begun: BeginImportResponse = await session.call_with(
        BEGIN_IMPORT, to_http(BEGIN_IMPORT, request)
    )
    for file, size in sizes.items():
        await _send(session, begun, folder / file, size, sent)
    finish = FinishImportRequest(import_id=begun.import_id)
    done: FinishImportResponse = await session.call_with(
        FINISH_IMPORT, to_http(FINISH_IMPORT, finish)
    )
    return done


def _sizes(folder: Path) -> dict[str, int]:
    missing = [name for name in IMPORTED_FILES if not (folder / name).is_file()]
    if missing:
        raise ValidationError(
            f"{folder} has no {' and no '.join(missing)}",
            remedy="give a folder that peft wrote with save_pretrained(…)",
        )
    return {name: (folder / name).stat().st_size for name in IMPORTED_FILES}


async def _send(
    session: Session, begun: BeginImportResponse, file: Path, size: int, sent: Told
) -> None:
    with file.open("rb") as content:
        offset = 0
        while offset < size:
            part = await asyncio.to_thread(content.read, min(begun.part_bytes, size - offset))
            if not part:
                raise ValidationError(f"{file} became shorter while it was sent")
            request = ImportPartRequest(import_id=begun.import_id, name=file.name, offset=offset)
            http = bytes_request(SEND_IMPORT_PART, request, part)
            await session.call_with(SEND_IMPORT_PART, http)
            offset += len(part)
            sent(len(part))
