"""Calls the method under test, with the arguments and results of each release."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from tests.compatibility.stage import RESULT_TIMEOUT_S, settled


class Caller:
    """The method under test. Waits for its value if it returns a future."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.was_called = False

    def __call__(self, target: Any, *args: Any, **options: Any) -> Any:
        """Call it on `target`. Options that the release does not know are left out."""
        method = self.of(target)
        if not callable(method):
            return method  # a property
        known = {name: value for name, value in options.items() if takes(method, name)}
        if self.name.endswith("_async"):
            return asyncio.run(waited_for(method(*args, **known)))
        return settled(method(*args, **known))

    def of(self, target: Any) -> Any:
        """The method itself, for calls that need more than a result."""
        self.was_called = True
        return getattr(target, self.name)


async def waited_for(value: Any) -> Any:
    """The final value of a coroutine; the first await of a training call only submits it."""
    async with asyncio.timeout(RESULT_TIMEOUT_S):
        while inspect.isawaitable(value):
            value = await value
        if hasattr(value, "__aiter__"):
            value = [item async for item in value]
    return value


def takes(method: Any, name: str) -> bool:
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
