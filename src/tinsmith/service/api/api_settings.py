"""The settings of the API; `run/service_settings.py` has those that users can set.

Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import msgspec

from tinsmith.wire.decode_limits import MIB


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and times of one server."""

    path_prefix: str = ""
    """The prefix of every path before `/api/v1`, without a trailing slash."""
    public_url: str | None = None
    """The base of URLs in answers; None: as the request was addressed."""
    direct_downloads: bool = True
    """Whether signed links redirect to the store, where that can sign URLs itself."""

    # Bodies; the limits on receiving them are those of `http/bodies.py`
    body_bytes: int = 64 * MIB
    """The largest body, as clients are told."""
    decoded_bytes: int = 256 * MIB
    """The most memory that a body may take when decompressed, and again when decoded."""

    # Waiting
    long_poll_s: float = 30.0
    """How long a long poll waits; clients time out after 45."""
    inline_bytes: int = MIB
    """Larger results are first announced by their size, to clients that ask for that."""
    is_embedded: bool = False
    """Whether the service runs in the program that uses it: if that is interrupted, finishing its
    session waits until its models are saved."""
    session_timeout_s: float = 300.0
    """How long a session may be silent before it is ended."""

    # Limits on one submission
    most_datums: int = 4096
    most_pass_tokens: int = 4 * MIB
    most_samples: int = 1024
    """Sequences of one sample request."""
    most_topk: int = 100
    most_targets: int = 4 * MIB
    """Cells of one tensor, counted as if it were dense."""
    most_pass_targets: int = 16 * MIB
    """The same of one submission: the largest tensor of each datum."""

    # Limits on what one tenant has in flight, where it has no quota of its own
    commands_in_flight: int = 20_000
    bytes_in_flight: int = 4096 * MIB
    most_sessions: int = 1024
    """Sessions that have not ended."""
    most_models: int = 256
    """Models that are being trained."""

    # Extensions of the protocol; see docs/extensions.md
    batch_items: int = 256
    batch_bytes: int = 4 * MIB
    answer_inline_bytes: int = 256 * 1024
    offers_streams: bool = True
    import_bytes: int = 2048 * MIB
    """The largest adapter that can be imported, which is in memory for a moment; 0: none."""
    offers_tokens: bool = True
    """Whether clients exchange their key for a short-lived token."""

    trusts_keyless: bool = False
    """Whether requests without a key are the default tenant's even if there are keys: for a service
    that only the owner of its data can reach."""
