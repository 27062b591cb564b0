"""What the calls on one model share: its place on the service, and its line of numbered calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.submission import Submitter
from tinsmith.errors import DecodeError
from tinsmith.types.record import Frozen, Record

T = TypeVar("T")


class ModelCalls:
    """Sends calls on one model in the order in which they are made."""

    def __init__(self, lease: SessionLease, model_id: str) -> None:
        self._lease = lease
        self._submitter = Submitter(lease.session, model_id)
        self.model_id = model_id

    @property
    def holder(self) -> SessionLease:
        """This client's hold on its session, for programs that reach below the surface."""
        return self._lease

    def _submit(
        self,
        name: str,
        kind: str,
        make: Callable[[int], Record | Frozen],
        finish: Callable[[Any], Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[Any]:
        """Take a place in the line now, and send the call when its turn comes."""
        submitter = self._submitter
        make(1)  # a mistake in the arguments is told here, not from the future
        place = submitter.line.take_place()

        async def work() -> Any:
            acknowledged = await submitter.submit(place, name, make)
            result = await submitter.result(acknowledged, kind)
            return result if finish is None else finish(result)

        return submitter.start(work(), [place], f"{name} of {self.model_id}", timeout)


def present(value: T | None, what: str) -> T:
    """What an answer must have."""
    if value is None:
        raise DecodeError(f"the service's answer has no {what}")
    return value
