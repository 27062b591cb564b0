"""A sampler's address, to be used in another process. It holds no credential.

It tells how the first client was set, but nothing that is a secret or sounds like one: no key, no
login of a proxy, and of such headers the name alone. The other process has those from its arguments
or its environment, and counts its samples from a number of its own, so that two processes never use
the same one.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tinsmith.client.retry import RetryBudget
from tinsmith.client.settings import (
    ClientSettings,
    LimiterScope,
    proxy_of_environment,
    settings_from,
)
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.service import ClientDynamicConfigResponse
from tinsmith.wire import json_format

_log = logging.getLogger(__name__)

_SECRET_NAME = re.compile(r"auth|key|secret|token|cookie|credential", re.IGNORECASE)
_PROXY = re.compile(r"(?P<scheme>https?://)?(.*@)?(?P<host>[^/?#]*)", re.IGNORECASE | re.DOTALL)


class SamplerHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process needs to know to sample from the same sampler."""

    base_url: str
    session_id: str
    sampling_session_id: str
    headers: dict[str, str] = {}
    """Those whose name does not sound like a secret."""
    header_names: list[str] = []
    """Of those that do, and whose values do not travel."""
    project_id: str | None = None
    retry: dict[str, float | None] = {}
    """The fields of a `RetryBudget`; None for a time without end, which JSON cannot say."""
    limiter_scope: LimiterScope = "key"
    proxy: str | None = None
    """Without its login."""
    ca_file: str | None = None
    unix_socket: str | None = None
    record_stability_info: bool = False
    flags: dict[str, bool | int | str] = {}
    dynamic_flags: dict[str, bool | int | str] = {}

    def to_text(self) -> str:
        """The handle as text that fits into an address or an environment variable."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> SamplerHandle:
        """Read a handle.

        Raises:
            ValidationError: It is not one.
        """
        try:
            return json_format.decode(base64.urlsafe_b64decode(text.encode()), cls)
        except (binascii.Error, ValueError, DecodeError) as exc:
            raise ValidationError(
                "this is not a sampler handle", remedy="make one with get_sampler_handle()"
            ) from exc

    def client_settings(
        self,
        *,
        api_key: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        ca_file: str | None = None,
        unix_socket: str | None = None,
    ) -> ClientSettings:
        """Settings for a client of this process: what is given here counts before the handle's."""
        given = default_headers or {}
        known = {name.lower() for name in given}
        own = {name: value for name, value in self.headers.items() if name.lower() not in known}
        settings = settings_from(
            base_url=self.base_url,
            api_key=api_key,
            default_headers={**own, **given},
            project_id=self.project_id,
            retry=self._budget(),
            limiter_scope=self.limiter_scope,
            proxy=proxy or self._own_proxy(),
            ca_file=ca_file or self.ca_file,
            unix_socket=unix_socket or self.unix_socket,
        )
        self._tell_missing(settings.default_headers)
        return settings

    def _budget(self) -> RetryBudget:
        known = (name for name in self.retry if name in RetryBudget.__struct_fields__)
        times = {name: self.retry[name] for name in known}
        return RetryBudget(
            **{name: math.inf if time is None else time for name, time in times.items()}
        )

    def _own_proxy(self) -> str | None:
        """The handle's proxy; the environment's if it is the same, since that may have a login."""
        own = proxy_of_environment(self.base_url)
        return own if self.proxy in (None, _without_login(own)) else self.proxy

    def _tell_missing(self, headers: Mapping[str, str]) -> None:
        given = {name.lower() for name in headers}
        missing = [name for name in self.header_names if name.lower() not in given]
        if missing:
            _log.warning(
                "sampler %s: its first client also sends the headers %s, whose values do not "
                "travel; give them to from_sampler_handle as default_headers_overrides",
                self.sampling_session_id,
                ", ".join(missing),
            )

    def client_flags(self) -> ServiceFlags:
        """The service's flags as the first process saw them."""
        return msgspec.convert(self.flags, ServiceFlags)

    def client_dynamic_flags(self) -> ClientDynamicConfigResponse:
        """The service's flags that may change, as the first process saw them last."""
        return msgspec.convert(self.dynamic_flags, ClientDynamicConfigResponse)


def shareable(settings: ClientSettings) -> dict[str, Any]:
    """What a handle tells of a client's settings.

    Left out are those for new sessions and for training, which a sampler has no use for.
    """
    times, headers = msgspec.structs.asdict(settings.retry), settings.default_headers
    secret = [name for name in headers if _SECRET_NAME.search(name)]
    return {
        "base_url": settings.base_url,
        "headers": {name: value for name, value in headers.items() if name not in secret},
        "header_names": secret,
        "project_id": settings.project_id,
        "retry": {name: None if time == math.inf else time for name, time in times.items()},
        "limiter_scope": settings.limiter_scope,
        "proxy": _without_login(settings.proxy),
        "ca_file": settings.ca_file,
        "unix_socket": settings.unix_socket,
    }


def _without_login(proxy: str | None) -> str | None:
    """A proxy's scheme, host and port, whatever marks its password holds."""
    found = None if proxy is None else _PROXY.match(proxy)
    return None if found is None else f"{found['scheme'] or ''}{found['host']}"
