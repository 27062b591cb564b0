"""Outcomes of calls: one per public name, and one run per SDK."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The outcome of one call."""

    method: str
    """For example `RestClient.whoami`; the same for its async twin."""
    name: str
    """The public name that was called: `whoami` or `whoami_async`."""
    error: str | None

    @property
    def kind(self) -> str:
        """The class that it is a method of."""
        return self.method.partition(".")[0]

    @property
    def is_coroutine(self) -> bool:
        return self.name.endswith("_async")


class Run(NamedTuple):
    """The outcomes of one SDK."""

    title: str
    outcomes: list[Outcome]
    end: str | None
    """Why its process failed; None if it did not."""

    def of(self, method: str) -> list[Outcome]:
        """The blocking call, then the coroutine; without those that this SDK has not."""
        found = [outcome for outcome in self.outcomes if outcome.method == method]
        return sorted(found, key=lambda outcome: outcome.is_coroutine)
