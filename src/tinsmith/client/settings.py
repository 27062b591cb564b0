"""The settings of a client, fixed when it is created (S40), and the address of its service.

Arguments override the environment, which is read once. Secrets never appear in `repr`, logs,
tracebacks or pickles.

A base URL has a scheme, a host, and optionally a port and a path. `base_url_parts` parses only
these; importing `urllib.parse` would take 0.4 MB. A service that consists of several servers may be
given as several base URLs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.errors import ValidationError

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
    """The parts of a service's base URL."""

    scheme: str
    host: str
    """In lower case; IPv6 addresses without brackets."""
    given_port: int | None
    path: str
    """Without a trailing slash."""

    @property
    def port(self) -> int:
        """The given port, else the scheme's default."""
        return self.given_port or DEFAULT_PORTS[self.scheme]

    @property
    def netloc(self) -> str:
        """Host and port as in a URL and in the `Host` header."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.given_port is None else f"{shown}:{self.given_port}"


def base_url_parts(text: str) -> BaseUrl:
    """Parse a base URL.

    Raises:
        ValueError: It is not a valid base URL.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("not an http or https address without a query")
    port = int(found["port"]) if found["port"] else None
    if port is not None and port > MOST_PORT:
        raise ValueError(f"invalid port {port}")
    return BaseUrl(
        scheme=found["scheme"].lower(),
        host=(found["ip6"] or found["host"]).lower(),
        given_port=port,
        path=(found["path"] or "").rstrip("/"),
    )


HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
EMBEDDED = "embedded"
"""The base URL of the service that runs in this process."""
LimiterScope = Literal["key", "client"]


class Secret:
    """Text that never appears in `repr`. It cannot be pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The secret text; only the code that sends it calls this."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a secret cannot be pickled; pass the credential again in the other process"
        )


class Headers(dict[str, str]):
    """Headers for every request; `repr` hides their values, which may be secrets."""

    def __repr__(self) -> str:
        return f"Headers({', '.join(f'{name}: ***' for name in self)})"


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a client."""

    base_url: str
    further_urls: tuple[str, ...] = ()
    """Other servers of the same service, for when one cannot be reached."""
    api_key: Secret | None = None
    credential_command: Secret | None = None
    """A command that prints the credential; secret, since it may contain one itself."""
    default_headers: Headers = msgspec.field(default_factory=Headers)
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    """The tags of new sessions; by default from `TINKER_TAGS`."""
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    retry: RetryBudget = DEFAULT_BUDGET
    limiter_scope: LimiterScope = "key"
    """Whether a pause applies to all clients with the same key or, as in the official SDK, to one
    client."""
    parallel_chunks: bool = True
    """Send the chunks of one training call at the same time; False sends one after another."""
    proxy: str | None = None
    """The URL of an HTTP proxy; by default from the environment."""
    ca_file: str | None = None
    """A PEM file with the CA certificates to trust instead of the system's."""
    unix_socket: str | None = None
    """The path of a Unix socket to connect to; the base URL then only names the service."""

    def __repr__(self) -> str:
        return f"ClientSettings(base_url={self.base_url!r})"  # the rest may be secret

    def __reduce__(self) -> Any:
        raise TypeError("settings contain a credential and cannot be pickled")


FURTHER_SETTINGS = frozenset(ClientSettings.__struct_fields__) - {
    *("base_url", "further_urls", "api_key", "credential_command", "default_headers", "retry")
}
"""Settings that clients accept as keyword arguments of the same name."""


def settings_from(
    *,
    base_url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    default_headers: Mapping[str, str] | None = None,
    project_id: str | None = None,
    environment: Mapping[str, str] | None = None,
    **rest: Any,
) -> ClientSettings:
    """Combine arguments, environment variables and defaults, in this order of precedence.

    An embedded service is never sent a key from the environment, only one given as an argument.

    Args:
        base_url: The service's URL, or `embedded`; by default `TINKER_BASE_URL`, else the hosted
            service. Several servers of one service are given as a list, or separated by commas.
        api_key: The credential; by default `TINKER_API_KEY`.
        default_headers: Headers to send with every request.
        project_id: The project of new sessions; by default `TINKER_PROJECT_ID`.
        environment: Used instead of the process's environment, except for the proxy.
        rest: Further fields of `ClientSettings`.

    Raises:
        ValidationError: The base URL is invalid.
    """
    env = os.environ if environment is None else environment
    url, *further = _checked_urls(base_url or env.get("TINKER_BASE_URL") or HOSTED_URL)
    tags = rest.pop("tags", None)
    if isinstance(tags, str):
        raise ValidationError(f"tags is {tags!r:.80}", remedy="pass a list of strings")
    if tags is None:
        tags = (tag for tag in env.get("TINKER_TAGS", "").split(",") if tag)
    elsewhere = {} if url == EMBEDDED else env
    key = api_key or elsewhere.get("TINKER_API_KEY") or None
    command = elsewhere.get("TINKER_CREDENTIAL_CMD") or None
    return ClientSettings(
        base_url=url,
        further_urls=tuple(further),
        api_key=None if key is None else Secret(key),
        credential_command=None if command is None else Secret(command),
        default_headers=Headers({**_access_headers(elsewhere), **(default_headers or {})}),
        project_id=project_id or env.get("TINKER_PROJECT_ID") or None,
        tags=tuple(tags),
        **{"proxy": proxy_of_environment(url), **rest},
    )


def _checked_urls(given: str | Sequence[str]) -> list[str]:
    """The base URLs in an argument or a variable, each once."""
    is_list = isinstance(given, (list, tuple))
    texts: Sequence[str] = given if is_list else str(given).split(",")
    urls = list(dict.fromkeys(_checked_url(str(text).strip()) for text in texts if text))
    if not urls:
        raise ValidationError(
            f"base_url {given!r:.200} names no address",
            remedy="give one like http://127.0.0.1:8000, or embedded",
        )
    if len(urls) > 1 and EMBEDDED in urls:
        raise ValidationError(
            "base_url names the embedded service beside other servers", remedy="give one of them"
        )
    return urls


def _checked_url(text: str) -> str:
    if text == EMBEDDED:
        return text
    url = str(text).rstrip("/")  # any type: the errors below name the value
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValidationError(
            "base_url contains a credential, which would appear in logs; use api_key"
        )
    try:
        parts = base_url_parts(url)
        if not parts.host.isascii():
            parts.host.encode("idna")  # raises if the name is invalid
    except ValueError:
        raise ValidationError(
            f"base_url {text!r:.200} is not an http or https address",
            remedy="pass one like http://127.0.0.1:8000, or embedded",
        ) from None
    return url


def proxy_of_environment(url: str) -> str | None:
    """The proxy for a URL according to the standard environment variables.

    None for loopback addresses, which a proxy cannot reach.
    """
    if url == EMBEDDED:
        return None
    if is_loopback(url):
        return None
    parts = base_url_parts(url)
    has_system_settings = sys.platform in ("darwin", "win32")
    if not has_system_settings and not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    import urllib.request  # imports a whole HTTP client

    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def is_loopback(url: str) -> bool:
    """Whether a URL's host is a loopback address."""
    if url == EMBEDDED:
        return True
    host = base_url_parts(url).host
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _access_headers(env: Mapping[str, str]) -> dict[str, str]:
    pairs = {
        "CF-Access-Client-Id": env.get("CLOUDFLARE_ACCESS_CLIENT_ID"),
        "CF-Access-Client-Secret": env.get("CLOUDFLARE_ACCESS_CLIENT_SECRET"),
    }
    return {name: value for name, value in pairs.items() if value}
