"""Sampler handles: text with which another process samples from the same sampler.

A handle contains the settings of the first client, but no secrets: no API key, no proxy password,
and only the names of headers whose name suggests a secret. The other process takes those from its
arguments or environment. It numbers its samples from a start of its own, so that two processes
never use the same number.
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
    """What another process needs to sample from the same sampler."""

    base_url: str
    further_urls: list[str] = []
    """Other servers of the same service."""
    session_id: str
    sampling_session_id: str
    headers: dict[str, str] = {}
    """Those whose name does not suggest a secret."""
    header_names: list[str] = []
    """The names of the others, whose values are not included."""
    project_id: str | None = None
    retry: dict[str, float | None] = {}
    """The fields of a `RetryBudget`; None for infinity, which JSON does not have."""
    limiter_scope: LimiterScope = "key"
    proxy: str | None = None
    """Without user and password."""
    ca_file: str | None = None
    unix_socket: str | None = None
    record_stability_info: bool = False
    flags: dict[str, bool | int | str] = {}
    dynamic_flags: dict[str, bool | int | str] = {}

    def to_text(self) -> str:
        """The handle as text that fits into a URL or an environment variable."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> SamplerHandle:
        """Read a handle.

        Raises:
            ValidationError: The text is not a handle.
        """
        try:
            return json_format.decode(base64.urlsafe_b64decode(text.encode()), cls)
        except (binascii.Error, ValueError, DecodeError) as exc:
            raise ValidationError(
                "this is not a sampler handle", remedy="create one with get_sampler_handle()"
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
        """Settings for a client of this process; arguments override the handle's."""
        given = default_headers or {}
        known = {name.lower() for name in given}
        own = {name: value for name, value in self.headers.items() if name.lower() not in known}
        settings = settings_from(
            base_url=[self.base_url, *self.further_urls],
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
        """The handle's proxy; the environment's if it is the same, which may have a password."""
        own = proxy_of_environment(self.base_url)
        return own if self.proxy in (None, _without_login(own)) else self.proxy

    def _tell_missing(self, headers: Mapping[str, str]) -> None:
        given = {name.lower() for name in headers}
        missing = [name for name in self.header_names if name.lower() not in given]
        if missing:
            _log.warning(
                "sampler %s: its first client also sends the headers %s, whose values are not in "
                "the handle; pass them to from_sampler_handle as default_headers_overrides",
                self.sampling_session_id,
                ", ".join(missing),
            )

    def client_flags(self) -> ServiceFlags:
        """The service's flags, as of the first process."""
        return msgspec.convert(self.flags, ServiceFlags)

    def client_dynamic_flags(self) -> ClientDynamicConfigResponse:
        """The service's flags that may change, as of the first process."""
        return msgspec.convert(self.dynamic_flags, ClientDynamicConfigResponse)


def shareable(settings: ClientSettings) -> dict[str, Any]:
    """The settings of a client that a handle contains.

    Those for new sessions and for training are left out: a sampler does not use them.
    """
    times, headers = msgspec.structs.asdict(settings.retry), settings.default_headers
    secret = [name for name in headers if _SECRET_NAME.search(name)]
    return {
        "base_url": settings.base_url,
        "further_urls": list(settings.further_urls),
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
    """A proxy's scheme, host and port, whatever characters its password contains."""
    found = None if proxy is None else _PROXY.match(proxy)
    return None if found is None else f"{found['scheme'] or ''}{found['host']}"
