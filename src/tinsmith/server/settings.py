"""What can be set about the server; `serve/settings.py` fills it from flags, files and environment.

Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import msgspec

from tinsmith.wire.limits import MIB


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and times of one server."""

    path_prefix: str = ""
    """What stands before `/api/v1` in every path, without a slash at its end."""
    public_url: str | None = None
    """Where clients find the service, for addresses in answers; None: as their requests say."""

    # Bodies
    body_bytes: int = 64 * MIB
    """The largest body, as it is sent."""
    decoded_bytes: int = 256 * MIB
    """The most that a body may take once it is unpacked, and again once it is read."""
    bodies_bytes: int = 1024 * MIB
    """The most that all bodies which are being read may take together."""
    tenant_bodies_bytes: int = 512 * MIB
    """The same of one tenant: eight of the largest."""
    address_bodies_bytes: int = 768 * MIB
    """The same of one address, which many tenants may share."""
    small_body_bytes: int = 64 * 1024
    """Bodies up to this size are not counted, so that large ones never keep them out."""
    upload_bytes_per_s: int = 1024
    """How fast a body must arrive, on average over a window."""
    upload_window_s: float = 30.0
    """The window, which is also how long a body may take to begin."""
    compress_from_bytes: int = 64 * 1024
    """Answers from this size on are packed for clients that accept it; 0: none are."""

    # Waiting
    long_poll_s: float = 30.0
    """How long a poll is held; clients give up after 45."""
    inline_bytes: int = MIB
    """Results above this are announced by size first, to clients that ask for that."""
    is_embedded: bool = False
    """Whether the service ends with the program that uses it: if that is stopped, finishing its
    session waits until its models are saved."""
    session_timeout_s: float = 300.0
    """How long a session may be silent before it is ended."""

    # What one submission may ask for
    most_datums: int = 4096
    most_pass_tokens: int = 4 * MIB
    most_samples: int = 1024
    """Sequences of one sample request."""
    most_topk: int = 100
    most_targets: int = 4 * MIB
    """Cells of one tensor, as it would be if all of them were written out."""
    most_pass_targets: int = 16 * MIB
    """The same of one submission: of each datum the largest tensor."""

    # What one tenant may have under way; its own quotas come first
    commands_in_flight: int = 20_000
    bytes_in_flight: int = 4096 * MIB
    most_sessions: int = 1024
    """That have not ended."""
    most_models: int = 256
    """That are being trained."""

    # Extensions of the protocol; see docs/extensions.md
    batch_items: int = 256
    batch_bytes: int = 4 * MIB
    answer_inline_bytes: int = 256 * 1024
    offers_streams: bool = True
    import_bytes: int = 2048 * MIB
    """The largest adapter that can be imported, which is held in memory for a moment; 0: none."""
    offers_tokens: bool = True
    """Whether clients exchange their key for a short-lived token."""

    trusts_keyless: bool = False
    """Whether whoever sends no key is the default tenant although there are keys: for a service
    that only the owner of its data can reach."""
