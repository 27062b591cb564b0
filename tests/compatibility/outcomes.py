"""How calls went: one outcome for each public name, one run for each SDK."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """How one call went, as the driver told it."""

    method: str
    """Such as `RestClient.whoami`; the twin for coroutines has the same."""
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
    """How the calls of one SDK went."""

    title: str
    outcomes: list[Outcome]
    end: str | None
    """Why its process did not end well; None if it did."""

    def of(self, method: str) -> list[Outcome]:
        """The blocking call, then the coroutine; without those that this SDK has not."""
        found = [outcome for outcome in self.outcomes if outcome.method == method]
        return sorted(found, key=lambda outcome: outcome.is_coroutine)
