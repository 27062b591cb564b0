"""A cache whose missing values are made once, however many threads ask for them at the same time.

The first to ask makes the value and the others wait for it; different keys do not wait for each
other. A failure reaches everyone who waited and is then forgotten: the next to ask tries again.

There is no lock to be inherited locked by a forked child: each step is one atomic operation on a
dictionary, and flights carry the id of their process, so a child never waits for its parent's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlightCache(Generic[K, V]):
    """Keeps the `most` values that were made last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, V] = {}
        self._flights: dict[tuple[int, K], Future[V]] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`; `make` is called if there is none and nobody is making it.

        Raises:
            Exception: Whatever `make` raised, here or in the thread that was making the value.
        """
        while True:
            if key in self._values:
                return self._values[key]
            mine: Future[V] = Future()
            flight = self._flights.setdefault((os.getpid(), key), mine)
            if flight is mine:
                return self._lead(key, mine, make)
            try:
                return flight.result()
            except CancelledError:
                continue  # its thread was interrupted, which says nothing about the value

    def clear(self) -> None:
        """Forget every value; those that are being made are still delivered."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def _lead(self, key: K, flight: Future[V], make: Callable[[], V]) -> V:
        try:
            # Another flight may have landed after our look and before our own took off.
            value = self._values[key] if key in self._values else make()
        except Exception as exc:
            self._land(key)
            flight.set_exception(exc)
            raise
        except BaseException:
            self._land(key)
            flight.cancel()
            raise
        self._values[key] = value
        self._land(key)
        flight.set_result(value)
        self._trim()
        return value

    def _land(self, key: K) -> None:
        del self._flights[os.getpid(), key]

    def _trim(self) -> None:
        for oldest in list(self._values)[: -self._most]:
            self._values.pop(oldest, None)
