"""Counts of what the scheduler did, for metrics and for whoever asks how it is."""

from __future__ import annotations

from collections import Counter


class Statistics:
    """Counts since the start. For one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a count."""
        self._counts[name] += amount  # type: ignore[assignment]  # times are counted as well

    def counts(self) -> dict[str, float]:
        """All counts by name."""
        return {name: float(amount) for name, amount in self._counts.items()}
