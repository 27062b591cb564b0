"""What a server is given: all that its handlers work with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engines.base import BaseModel
from tinsmith.ledger.base import Ledger
from tinsmith.server.settings import ServerSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of the service that the server knows. Time is the ledger's, `ledger.now()`."""

    ledger: Ledger
    base_models: Mapping[str, BaseModel]
    """By name, aliases among them."""
    store: CheckpointStore | None = None
    """Where checkpoints are; None for a service without."""
    settings: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    secret: bytes = b""
    """What tokens and addresses are signed with; made anew at each start if it is empty."""
