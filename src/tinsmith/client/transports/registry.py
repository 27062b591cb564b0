"""Which transport carries requests to a service; each is loaded when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from tinsmith.client.settings import EMBEDDED
from tinsmith.client.transports.base import Transport, TransportSettings


def transport_for(reach: TransportSettings, credentials: Callable[[], str]) -> Transport:
    """What carries requests to a service: through a proxy if there is one, else straight."""
    if reach.base_url == EMBEDDED:
        from tinsmith.client.transports.embedded import EmbeddedTransport

        return EmbeddedTransport(reach, credentials)
    if reach.proxy is not None:
        from tinsmith.client.transports.proxied import ProxiedTransport  # its library takes 0.2 s

        return ProxiedTransport(reach, credentials)
    from tinsmith.client.transports.direct import DirectTransport

    return DirectTransport(reach, credentials)
