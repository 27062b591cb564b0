"""What all handlers of one server share."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engine.base import BaseModel
from tinsmith.service.api.admission import Admission, Quotas
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.authentication import Authenticator
from tinsmith.service.api.long_polls import LongPolls, ReportedPauses
from tinsmith.service.api.lookups import Lookups
from tinsmith.service.api.session_lifecycle import SessionLifecycle
from tinsmith.service.api.store_threads import StoreThreads
from tinsmith.service.api.weight_uploads import WeightUploads
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import TenantId


class ApiContext:
    """The components of one server's API. For one event loop.

    Args:
        ledger: The durable record. Time is the ledger's, `ledger.now()`.
        base_models: By name, aliases among them.
        store: Where checkpoints are; None for a service without.
        settings: Limits and times.
        secret: What tokens and download links are signed with; a new one if it is empty.
    """

    def __init__(
        self,
        ledger: Ledger,
        base_models: Mapping[str, BaseModel],
        *,
        store: CheckpointStore | None = None,
        settings: ApiSettings | None = None,
        secret: bytes = b"",
    ) -> None:
        self.ledger = ledger
        self.base_models = base_models
        self.store = store
        self.settings = settings = settings or ApiSettings()
        self.secret = secret or secrets.token_bytes(32)
        self.lookups = Lookups(ledger)
        self.authenticator = Authenticator(
            ledger, self.secret, trusts_keyless=settings.trusts_keyless
        )
        self.quotas = Quotas(ledger, settings)
        self.admission = Admission(ledger, settings, self.quotas)
        self.sessions = SessionLifecycle(ledger, self.lookups, settings.session_timeout_s)
        self.reported_pauses = ReportedPauses()
        self.whole_streams: set[str] = set()
        """Samples whose tokens were streamed from the first on."""
        self.streams_of: Counter[TenantId] = Counter()
        """How many streams each tenant has."""
        self.long_polls = LongPolls()
        self.store_threads = StoreThreads()
        self.uploads = WeightUploads(
            ledger, base_models, store, settings.import_bytes, self.store_threads, self.quotas
        )
