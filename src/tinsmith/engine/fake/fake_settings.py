"""Settings of the fake engine. Does not import numpy."""

from __future__ import annotations

import msgspec


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of the fake engine; tests make it slow or small."""

    tokens_per_step: int = 8
    """Tokens sampled per sequence in one sampler step."""
    step_s: float = 0.0
    """Minimum duration of a sampler step."""
    batch_s: float = 0.0
    """Minimum duration of a training batch."""
    most_adapters: int = 1024
    most_samples: int = 2048
    batch_tokens: int = 65_536
    adapter_bytes: int | None = None
    """Memory for adapters, as it is reported; None for unknown."""
