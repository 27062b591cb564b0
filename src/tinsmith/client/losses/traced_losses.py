"""The losses of a session; importable without torch."""

from __future__ import annotations

import threading

from tinsmith.errors import ValidationError


class TracedLosses:
    """The losses of one session; each may be created once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()

    def add(self, key: str, name: str) -> None:
        """Record a loss.

        Raises:
            ValueError: The session already has this loss.
        """
        with self._lock:
            if key in self._keys:
                raise ValidationError(
                    f"custom loss {name!r} already exists in this session",
                    remedy="reuse the handle that was returned for it",
                )
            self._keys.add(key)

    def forget(self, key: str) -> None:
        """Remove a loss whose creation failed, so that it can be created again."""
        with self._lock:
            self._keys.discard(key)
