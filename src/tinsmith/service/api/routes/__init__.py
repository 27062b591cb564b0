"""What answers each endpoint. A module here is a group of routes; see `api_call.py`.

| in a module | what it is |
|---|---|
| `HANDLERS` | from names of endpoints to handlers |
| `FURTHER_ENDPOINTS` | a list of endpoints that `wire/endpoints.py` does not have, if any |
| `OPEN` | names of endpoints that need no credential, if any |

Every endpoint has one handler. What is missing is found at the start, not by a client.
"""

from __future__ import annotations

import importlib

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.service.api.api_call import Handler
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS

MODULES: tuple[str, ...] = (
    "start",
    "sessions",
    "training",
    "sampling",
    "futures",
    "extensions",
    "streams",
    "runs",
    "checkpoints",
    "downloads",
    "uploads",
    "search",
    "checkpoint_search",
    "usage",
    "fleet",
    "api_docs",
)
"""In the order in which their own paths are tried."""


class Routes(msgspec.Struct, frozen=True):
    """All endpoints, what answers them, and which of them need no credential."""

    endpoints: list[Endpoint]
    handlers: dict[str, Handler]
    open: frozenset[str]


def collect() -> Routes:
    """The routes of all modules.

    Raises:
        ValidationError: An endpoint has no handler, or more than one, or a handler no endpoint.
    """
    endpoints = list(ENDPOINTS.values())
    handlers: dict[str, Handler] = {}
    open_names: frozenset[str] = frozenset()
    for name in MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        endpoints += getattr(module, "FURTHER_ENDPOINTS", [])
        open_names |= getattr(module, "OPEN", frozenset())
        for endpoint, handler in module.HANDLERS.items():
            if endpoint in handlers:
                raise ValidationError(f"{endpoint} has two handlers; one is in routes/{name}.py")
            handlers[endpoint] = handler
    names = {endpoint.name for endpoint in endpoints}
    if names != set(handlers):
        raise ValidationError(
            f"endpoints without a handler: {sorted(names - set(handlers))}; "
            f"handlers without an endpoint: {sorted(set(handlers) - names)}"
        )
    return Routes(endpoints, handlers, open_names)
