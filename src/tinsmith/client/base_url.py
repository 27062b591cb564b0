"""The address of a service, taken apart.

It is far less than any address may be: a scheme, a host, perhaps a port and a path. Python's own
reader of addresses knows all the rest, and the networks of the internet, in 0.4 MB.
"""

from __future__ import annotations

import re
from typing import NamedTuple

DEFAULT_PORTS = {"http": 80, "https": 443}
MOST_PORT = 65_535

_FORM = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<ip6>[0-9a-z:.%]+)\]|(?P<host>[^/?#@:\[\]\s]+))"
    r"(?::(?P<port>[0-9]*))?"
    r"(?P<path>/[^?#\s]*)?",
    re.IGNORECASE,
)


class BaseUrl(NamedTuple):
    """Where a service is."""

    scheme: str
    host: str
    """In lower case; an IPv6 address without its brackets."""
    given_port: int | None
    path: str
    """Without a slash at its end."""

    @property
    def port(self) -> int:
        """The port, which goes without saying unless it is given."""
        return self.given_port or DEFAULT_PORTS[self.scheme]

    @property
    def netloc(self) -> str:
        """Host and port as they stand in an address, and in the header `Host`."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.given_port is None else f"{shown}:{self.given_port}"


def base_url_parts(text: str) -> BaseUrl:
    """Take an address apart.

    Raises:
        ValueError: It is not the address of a service.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("not an http or https address without a query")
    port = int(found["port"]) if found["port"] else None
    if port is not None and port > MOST_PORT:
        raise ValueError(f"there is no port {port}")
    return BaseUrl(
        scheme=found["scheme"].lower(),
        host=(found["ip6"] or found["host"]).lower(),
        given_port=port,
        path=(found["path"] or "").rstrip("/"),
    )
