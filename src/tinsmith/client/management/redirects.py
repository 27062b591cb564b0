"""Calls that a service may answer with a redirect.

A redirect is followed with a plain GET. Our credential and headers are sent only to the service's
own origin, never to another host. The redirect to a checkpoint's archive is not followed, as in
releases of the API up to 0.35: the URL is the result.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from tinsmith.client.session import Session
from tinsmith.client.transports.base import ExchangeReply, TransportSettings, transport_for
from tinsmith.errors import APIError, APIResponseValidationError, APIStatusError, DecodeError
from tinsmith.types.checkpoints import CheckpointArchiveUrlResponse
from tinsmith.types.record import Record
from tinsmith.types.requests import CheckpointRequest
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, read_reply
from tinsmith.wire.failures import REDIRECTS, error_from_reply

MOST_HOPS = 5


async def call_and_follow(session: Session, name: str, request: Record) -> Any:
    """Make an API call, and follow redirects to its response.

    Raises:
        APIError: Either request failed.
    """
    endpoint = ENDPOINTS[name]
    try:
        return await session.call(name, request)
    except APIStatusError as error:
        address = redirect_of(error)
        if address is None:
            raise
    asked = session.settings.base_url + endpoint.path
    return await _fetched(session, endpoint, _joined(endpoint, asked, address))


def _joined(endpoint: Endpoint, at: str, address: str) -> str:
    try:
        return urljoin(at, address)
    except ValueError as exc:
        raise _no_address(endpoint, address) from exc


def redirect_of(error: APIStatusError) -> str | None:
    """The target of a redirect; None if the reply is not a redirect."""
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    return headers.get("location") if error.status_code in REDIRECTS else None


async def _fetched(session: Session, endpoint: Endpoint, address: str) -> Any:
    for _ in range(MOST_HOPS):
        at = address

        async def attempt(_: int, at: str = at) -> ExchangeReply:
            return await _fetch(session, endpoint, at)

        reply = await session.retrier.call(attempt, f"{endpoint.name}, redirected")
        if reply.status not in REDIRECTS:
            return _decoded(endpoint, reply)
        address = _joined(endpoint, address, reply.headers["location"])
    raise APIError(f"{endpoint.name}: redirected more than {MOST_HOPS} times")


async def _fetch(session: Session, endpoint: Endpoint, address: str) -> ExchangeReply:
    """Fetch a URL once; returns the response, or a further redirect."""
    settings = session.settings
    try:
        parts = urlsplit(address)
        own = (settings.base_url, *settings.further_urls)
        is_own = _origin(address) in map(_origin, own)
    except ValueError as exc:
        raise _no_address(endpoint, address) from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _no_address(endpoint, address)
    transport = transport_for(
        TransportSettings(
            base_url=f"{parts.scheme}://{parts.netloc}",
            headers=settings.default_headers if is_own else {},
            unix_socket=settings.unix_socket if is_own else None,
            ca_file=settings.ca_file,
            proxy=settings.proxy,
        ),
        session.credentials.current if is_own else lambda: "",
    )
    path = parts.path or "/"
    sent = HttpRequest(
        "GET",
        f"{path}?{parts.query}" if parts.query else path,
        {},
        {"Accept": "application/json"},
        [],
    )
    try:
        reply = await transport.send(sent, pool=endpoint.pool, timeout_s=endpoint.timeout_s)
    finally:
        await transport.close()
    if 200 <= reply.status < 300 or (reply.status in REDIRECTS and "location" in reply.headers):
        return reply
    raise error_from_reply(reply.status, reply.headers, reply.body)


def _no_address(endpoint: Endpoint, address: str) -> APIError:
    return APIError(f"{endpoint.name}: redirected to the invalid address {address!r:.200}")


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _decoded(endpoint: Endpoint, reply: ExchangeReply) -> Any:
    try:
        return read_reply(endpoint, reply.body)
    except DecodeError as exc:
        raise APIResponseValidationError(
            reply, bytes(reply.body[:1000]), message=f"{endpoint.name}: {exc}"
        ) from exc


DEFAULT_LIFETIME = datetime.timedelta(minutes=15)
"""How long a URL is valid if the service does not say."""


async def archive_url(session: Session, request: CheckpointRequest) -> CheckpointArchiveUrlResponse:
    """The URL of a checkpoint's archive; retries while the service is still creating it (503).

    Raises:
        NotFoundError: There is no such checkpoint, or the service does not offer archives.
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
