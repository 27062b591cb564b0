"""The future of a client that is being created, which can be used as that client directly.

A method that creates a client returns a `ClientFuture`. `await` it or call `result()` to get the
client itself; or use the future as if it were the client, as programs do that were written before
creation methods returned futures.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from tinsmith.client.futures import APIFuture

C = TypeVar("C")

_OWN_NAMES = frozenset(vars(APIFuture()))
"""Attributes of the future; all others are the client's."""


class ClientFuture(APIFuture[C]):
    """A client that is being created, for a subclass that also inherits from the client's class.

    The client's methods find its attributes here: they are copied when it is created, so that calls
    through the future cost no more than calls on the client, and share its queue and numbers. Until
    then, an attribute of the client waits for it, and raises the error if it cannot be created.
    """

    CLIENT_ATTRIBUTES: ClassVar[frozenset[str]]
    """Names of the attributes that the client's constructor sets."""

    def __init__(self, creating: APIFuture[C]) -> None:
        super().__init__(creating.what)
        self.stop_work_with(creating.cancel)
        creating.when_settled(self._follow)

    def _follow(self, creating: APIFuture[C]) -> None:
        if creating.cancelled():
            self.cancel()
        elif (error := creating.exception()) is not None:
            self.fail(error)
        else:
            self.settle(creating.result())

    def settle(self, value: C) -> None:
        """Set the client, unless its creation was cancelled meanwhile."""
        vars(self).update(vars(value))
        super().settle(value)

    def in_thread(self) -> Self:
        """This future. Where no event loop is running, wait until the client is created.

        A program without `await` thus gets the error of a failed creation from the line that asked
        for the client. A coroutine is not held up: the loop that it runs on goes on meanwhile.
        """
        if asyncio._get_running_loop() is None:
            self.result()
        return self

    def _is_created(self) -> bool:
        return self.done() and not self.cancelled() and self.exception() is None

    if not TYPE_CHECKING:  # a checker that knew of it would accept every name

        def __getattr__(self, name: str) -> Any:
            # Nothing else waits: shells and debuggers look for names that no client has.
            is_special = name.startswith("__") or name in _OWN_NAMES
            if not is_special and (name in self.CLIENT_ATTRIBUTES or self._is_created()):
                return getattr(self.result(), name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", obj=self
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN_NAMES:  # such as a handler, which the client itself will look for
            setattr(self.result(), name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.result(), name)
        super().__delattr__(name)

    def __repr__(self) -> str:
        return repr(self.result()) if self._is_created() else super().__repr__()
