"""The first line and the headers of requests, as bytes.

Nearly all of them are the same for every request of a kind, so that text is kept. What differs
each time stands behind it: the idempotency key, the length of the body, and headers that a
request has for itself alone.
"""

from __future__ import annotations

from tinsmith.client.base_url import base_url_parts
from tinsmith.client.transports.base import (
    TransportSettings,
    fixed_headers,
    new_idempotency_key,
)
from tinsmith.errors import ValidationError
from tinsmith.wire.exchange import HttpRequest

MOST_KEPT = 64
"""Of how many kinds the text is kept. Requests with an id in their path are a kind each."""


class Heads:
    """The heads of the requests to one service. For one thread."""

    def __init__(self, settings: TransportSettings, host: str) -> None:
        self._settings = settings
        self._host = host
        self._prefix = base_url_parts(settings.base_url).path
        self._overridden = frozenset(name.lower() for name in settings.headers)
        self._kept: dict[tuple[object, ...], bytes] = {}

    def of(
        self,
        request: HttpRequest,
        idempotency_key: str | None,
        credential: str,
        *,
        packings: str | None = None,
    ) -> bytes:
        """The head of a request, with the empty line that ends it.

        Args:
            request: What is sent.
            idempotency_key: Made up if None.
            credential: What it is sent with.
            packings: How the reply may be packed, instead of as usual.

        Raises:
            ValidationError: A header holds what HTTP cannot carry.
        """
        text = ""
        if request.method != "GET":
            text = f"X-Idempotency-Key: {idempotency_key or new_idempotency_key()}\r\n"
        if request.method != "GET" or request.parts:
            text += f"Content-Length: {sum(map(len, request.parts))}\r\n"
        own = _lines(self._not_overridden(request.once)) if request.once else b""
        return b"".join(
            (self._beginning(request, credential, packings), own, text.encode(), b"\r\n")
        )

    def _not_overridden(self, headers: dict[str, str]) -> dict[str, str]:
        if not self._overridden:
            return headers
        return {
            name: value for name, value in headers.items() if name.lower() not in self._overridden
        }

    def _beginning(self, request: HttpRequest, credential: str, packings: str | None) -> bytes:
        if request.query:
            return self._written(request, credential, packings)
        kind = (request.method, request.path, credential, packings, *request.headers.items())
        text = self._kept.get(kind)
        if text is None:
            text = self._written(request, credential, packings)
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[kind] = text
        return text

    def _written(self, request: HttpRequest, credential: str, packings: str | None) -> bytes:
        headers = fixed_headers(self._settings, request.headers, credential)
        headers["Host"] = self._host
        if packings is not None:
            headers["Accept-Encoding"] = packings
        target = self._prefix + request.path
        if request.query:
            from urllib.parse import urlencode  # which samples do without

            target += "?" + urlencode(request.query)
        return _checked(f"{request.method} {target} HTTP/1.1\r\n", 1) + _lines(headers)


def _lines(headers: dict[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return _checked(text, len(headers))


def _checked(text: str, lines: int) -> bytes:
    """Nothing given for a header may add a line of its own."""
    if text.count("\n") != lines or text.count("\r") != lines or "\0" in text:
        raise ValidationError("a header of the request holds a line break or a NUL")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as exc:
        raise ValidationError("a header holds a character that HTTP cannot carry") from exc
