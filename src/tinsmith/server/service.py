"""What all handlers of one server share."""

from __future__ import annotations

import dataclasses
import secrets

from tinsmith.server.lookups import Lookups
from tinsmith.server.parts import Parts


class Service:
    """The parts, and what this server remembers beside them. For one event loop."""

    def __init__(self, parts: Parts) -> None:
        if not parts.secret:
            parts = dataclasses.replace(parts, secret=secrets.token_bytes(32))
        self.parts = parts
        self.lookups = Lookups(parts.ledger)
