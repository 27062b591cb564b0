"""Where a checkpoint's archive is, however the service says so.

Releases of the API up to 0.35 have it: a redirect to the archive, which is not followed, or an
answer that names the address. A service that has still to pack it says 503, and is asked again.
"""

from __future__ import annotations

import datetime

from tinsmith.client.management.redirects import redirect_of
from tinsmith.client.session import Session
from tinsmith.errors import APIStatusError
from tinsmith.types.checkpoints import CheckpointArchiveUrlResponse
from tinsmith.types.requests import CheckpointRequest

DEFAULT_LIFETIME = datetime.timedelta(minutes=15)
"""How long an address is good for, where the service does not say."""


async def archive_url(session: Session, request: CheckpointRequest) -> CheckpointArchiveUrlResponse:
    """The address of a checkpoint's archive.

    Raises:
        NotFoundError: There is no such checkpoint, or the service has no archives any more.
    """
    try:
        answer: CheckpointArchiveUrlResponse = await session.call(
            "get_checkpoint_archive_url", request
        )
    except APIStatusError as error:
        address = redirect_of(error)
        if address is None:
            raise
        return CheckpointArchiveUrlResponse(url=address, expires=_expiry(error))
    return answer


def _expiry(error: APIStatusError) -> datetime.datetime:
    import email.utils

    try:
        told = email.utils.parsedate_to_datetime(error.response.headers.get("expires", ""))
    except ValueError:
        return datetime.datetime.now(datetime.UTC) + DEFAULT_LIFETIME
    return told if told.tzinfo is not None else told.replace(tzinfo=datetime.UTC)
