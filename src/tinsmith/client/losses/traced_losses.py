"""Which losses a session has: what a `ServiceClient` knows of them before the first is traced."""

from __future__ import annotations

import threading

from tinsmith.errors import ValidationError


class TracedLosses:
    """The losses of one session: each may be made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()

    def add(self, key: str, name: str) -> None:
        """Take note of a loss.

        Raises:
            ValueError: The session has it already.
        """
        with self._lock:
            if key in self._keys:
                raise ValidationError(
                    f"custom loss {name!r} was already made in this session",
                    remedy="keep and use its handle",
                )
            self._keys.add(key)

    def forget(self, key: str) -> None:
        """Let a loss be made again, after it could not be."""
        with self._lock:
            self._keys.discard(key)
