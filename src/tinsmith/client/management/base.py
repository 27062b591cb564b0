"""What the clients for looking up and taking care share: a session without a training session.

Clients that are made with the same settings share their connections and make their start-up calls
once; when the last of them is dropped, so are the connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.client.background import background
from tinsmith.client.embedding import chosen_url
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.retry import RetryBudget
from tinsmith.client.session import Session
from tinsmith.client.settings import FURTHER_SETTINGS, settings_from
from tinsmith.client.shared_leases import shared_leases
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types.record import Record


class ManagementClient:
    """Makes calls that belong to no training session.

    It is made with an address and a key, each from the environment if it is left out, and with
    whatever else a `ServiceClient` can be told (`proxy`, `ca_file`, `unix_socket` and the like); or
    with what a `ServiceClient` has as its `holder`, and then with nothing else.
    """

    def __init__(
        self,
        _holder: SessionLease | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        retry: RetryBudget | None = None,
        **settings: Any,
    ) -> None:
        unknown = [name for name in settings if name not in FURTHER_SETTINGS]
        if unknown:
            raise UnknownFieldError(f"{type(self).__name__} does not know {', '.join(unknown)}")
        if default_headers_overrides is not None:
            settings["default_headers"] = default_headers_overrides
        if retry is not None:
            settings["retry"] = retry
        if _holder is not None and (base_url is not None or api_key is not None or settings):
            raise ValidationError(
                "a client of a service has that service's address, key and settings",
                remedy="give its holder alone, or no holder",
            )
        if _holder is None:
            url = chosen_url(base_url, api_key)
            chosen = settings_from(base_url=url, api_key=api_key, **settings)
            _holder = shared_leases.lease(chosen)
        self._lease = _holder

    @property
    def holder(self) -> SessionLease:
        """This client's hold on its connections, for programs that reach below the surface."""
        return self._lease

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""
        return

    def _start(
        self,
        name: str,
        request: Record,
        timeout: float | None,
        *,
        method: str | None = None,
    ) -> APIFuture[Any]:
        """Make a call; `method` is the public name that it is made under, if it is another."""
        return background().start(self._call(name, request, method), method or name, timeout)

    async def _call(self, name: str, request: Record, method: str | None = None) -> Any:
        session = await self._ready()
        headers = None if method is None else {"x-sdk-method": method}
        return await session.call(name, request, headers=headers)

    async def _ready(self) -> Session:
        session = self._lease.session
        await session.ready()
        return session

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} holds connections and is not pickled; make one in the other "
            "process"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_url={self._lease.session.settings.base_url!r})"
