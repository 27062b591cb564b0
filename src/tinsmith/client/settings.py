"""What a client was told when it was made; nothing read later changes it (S40).

Arguments count before the environment, and the environment is read once. Secrets never show: not in
`repr`, logs, tracebacks or pickles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tinsmith.client.base_url import base_url_parts
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.errors import ValidationError

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
EMBEDDED = "embedded"
"""The base URL of the service that runs in this process."""
LimiterScope = Literal["key", "client"]


class Secret:
    """Text that is used and never shown. It cannot be pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one place that sends it."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled; give the credential again on the other side")


class Headers(dict[str, str]):
    """Headers for every request; their values may be secrets and are not shown."""

    def __repr__(self) -> str:
        return f"Headers({', '.join(f'{name}: ***' for name in self)})"


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a client needs to know of its service and of how to behave."""

    base_url: str
    api_key: Secret | None = None
    credential_command: Secret | None = None
    """It may hold a secret itself."""
    default_headers: Headers = msgspec.field(default_factory=Headers)
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    """Of new sessions; else those of `TINKER_TAGS`."""
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    retry: RetryBudget = DEFAULT_BUDGET
    limiter_scope: LimiterScope = "key"
    """Whether a pause holds for all clients of a key, or, as in the official SDK, for one
    client."""
    parallel_chunks: bool = True
    """Send the chunks of one training call at the same time; False sends one after another."""
    proxy: str | None = None
    """An HTTP proxy; the one of the environment where none was given."""
    ca_file: str | None = None
    """Certificates, in PEM, of authorities to trust instead of the system's."""
    unix_socket: str | None = None
    """The service is reached through this socket; the address then says only what it is called."""

    def __repr__(self) -> str:
        return f"ClientSettings(base_url={self.base_url!r})"  # the rest may be secret

    def __reduce__(self) -> Any:
        raise TypeError("settings hold a credential, and are not pickled")


FURTHER_SETTINGS = frozenset(ClientSettings.__struct_fields__) - {
    *("base_url", "api_key", "credential_command", "default_headers", "retry")
}
"""What a client can be told by the setting's own name; the others have other ways."""


def settings_from(
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    default_headers: Mapping[str, str] | None = None,
    project_id: str | None = None,
    environment: Mapping[str, str] | None = None,
    **rest: Any,
) -> ClientSettings:
    """Settings from arguments, then from the environment, then by default.

    The service in this process is the owner's own: it is sent no key but one that is an argument.

    Args:
        base_url: Where the service is, or `embedded`; else `TINKER_BASE_URL`, else the hosted
            service.
        api_key: The credential; else `TINKER_API_KEY`.
        default_headers: Sent with every request.
        project_id: For new sessions; else `TINKER_PROJECT_ID`.
        environment: What stands for the environment; the process's own by default, which a proxy is
            always taken from.
        rest: Further fields of `ClientSettings`.

    Raises:
        ValidationError: The base URL is not one.
    """
    env = os.environ if environment is None else environment
    url = _checked_url(base_url or env.get("TINKER_BASE_URL") or HOSTED_URL)
    tags = rest.pop("tags", None)
    if isinstance(tags, str):
        raise ValidationError(f"tags is {tags!r:.80}", remedy="give a list of texts")
    if tags is None:
        tags = (tag for tag in env.get("TINKER_TAGS", "").split(",") if tag)
    elsewhere = {} if url == EMBEDDED else env
    key = api_key or elsewhere.get("TINKER_API_KEY") or None
    command = elsewhere.get("TINKER_CREDENTIAL_CMD") or None
    return ClientSettings(
        base_url=url,
        api_key=None if key is None else Secret(key),
        credential_command=None if command is None else Secret(command),
        default_headers=Headers({**_access_headers(elsewhere), **(default_headers or {})}),
        project_id=project_id or env.get("TINKER_PROJECT_ID") or None,
        tags=tuple(tags),
        **{"proxy": proxy_of_environment(url), **rest},
    )


def _checked_url(text: str) -> str:
    if text == EMBEDDED:
        return text
    url = str(text).rstrip("/")  # whatever was given, it is told what is wrong with it
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValidationError("base_url holds a credential, which logs would show; use api_key")
    try:
        parts = base_url_parts(url)
        if not parts.host.isascii():
            parts.host.encode("idna")  # raises where no name can be so
    except ValueError:
        raise ValidationError(
            f"base_url {text!r:.200} is not an http or https address",
            remedy="give one like http://127.0.0.1:8000, or embedded",
        ) from None
    return url


def proxy_of_environment(url: str) -> str | None:
    """The proxy that the environment names for an address, as other programs would use it.

    None for this machine itself, whose services no proxy can reach.
    """
    if url == EMBEDDED:
        return None
    if is_loopback(url):
        return None
    parts = base_url_parts(url)
    has_system_settings = sys.platform in ("darwin", "win32")
    if not has_system_settings and not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    import urllib.request  # brings a whole HTTP client along

    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def is_loopback(url: str) -> bool:
    """Whether an address is one of this machine, which nobody else can reach."""
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
