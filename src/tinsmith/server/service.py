"""What all handlers of one server share."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter

from tinsmith.ledger.records import TenantId
from tinsmith.server.admission import Admission
from tinsmith.server.auth import Credentials
from tinsmith.server.feeds import ToldHolds
from tinsmith.server.imports import Imports
from tinsmith.server.longpoll import Waits
from tinsmith.server.lookups import Lookups
from tinsmith.server.parts import Parts
from tinsmith.server.quotas import Quotas
from tinsmith.server.sessions import Sessions
from tinsmith.server.store_threads import StoreThreads


class Service:
    """The parts, and what this server remembers beside them. For one event loop."""

    def __init__(self, parts: Parts) -> None:
        if not parts.secret:
            parts = dataclasses.replace(parts, secret=secrets.token_bytes(32))
        self.parts = parts
        self.lookups = Lookups(parts.ledger)
        self.credentials = Credentials(
            parts.ledger, parts.secret, trusts_keyless=parts.settings.trusts_keyless
        )
        self.quotas = Quotas(parts.ledger, parts.settings)
        self.admission = Admission(parts.ledger, parts.settings, self.quotas)
        self.sessions = Sessions(parts.ledger, self.lookups, parts.settings.session_timeout_s)
        self.told_holds = ToldHolds()
        self.whole_streams: set[str] = set()
        """Samples whose tokens were watched from the first on."""
        self.streams_of: Counter[TenantId] = Counter()
        """How many streams each tenant has."""
        self.waits = Waits()
        self.store_threads = StoreThreads()
        self.imports = Imports(parts, self.store_threads)

    def end_waits(self) -> None:
        """Answer all that wait, and let nobody wait from now on. To be called before a stop."""
        self.waits.close()
