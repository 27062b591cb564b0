"""One call as its handler sees it, and what a handler may answer.

A module in `routes/` has a dict `HANDLERS`, from names of endpoints to handlers. A handler is
`async def name(call: Call) -> Answer`; what it raises becomes the reply that stands for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.errors import NotFoundError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import TenantId
from tinsmith.server.parts import Parts
from tinsmith.server.settings import ServerSettings
from tinsmith.types.buffers import Memory
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.endpoint_types import Endpoint, Format
from tinsmith.wire.exchange import HttpReply

if TYPE_CHECKING:
    from tinsmith.server.service import Service


@dataclasses.dataclass(frozen=True)
class StreamedReply:
    """An answer whose body is made while it is sent.

    The pieces are closed when the client leaves. With a `Content-Length` among the headers they
    must add up to it; without, they are sent in chunks.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


Answer: TypeAlias = Record | Frozen | HttpReply | StreamedReply | None
"""A value is written as JSON, None is 204, the others are sent as they are."""

Handler: TypeAlias = "Callable[[Call], Awaitable[Answer]]"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One request, decoded, from a tenant whose credential was checked."""

    service: Service
    endpoint: Endpoint
    request: Any
    """Of the endpoint's type."""
    tenant_id: TenantId
    """Empty for endpoints that need no credential."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Memory = b""
    """As it came, unpacked."""
    format: Format = Format.JSON
    call_id: str = ""
    """What logs and the `X-Request-Id` header call this exchange."""
    base_url: str = ""
    """Where the client found the service: scheme, host and prefix, before `/api/v1`."""
    left: Callable[[], asyncio.Future[None]] = lambda: asyncio.get_running_loop().create_future()
    """A future that is done when the client has left. Whoever waits for long asks for it, once,
    and cancels it in the end."""

    @property
    def parts(self) -> Parts:
        """What the server was given."""
        return self.service.parts

    @property
    def ledger(self) -> Ledger:
        """The durable record."""
        return self.service.parts.ledger

    @property
    def store(self) -> CheckpointStore:
        """Saved weights; raises `NotFoundError` in a service that keeps none."""
        if self.service.parts.store is None:
            raise NotFoundError("this service keeps no checkpoints")
        return self.service.parts.store

    @property
    def settings(self) -> ServerSettings:
        """What can be set."""
        return self.service.parts.settings
