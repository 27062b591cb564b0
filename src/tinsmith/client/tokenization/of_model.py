"""The tokenizer of a client's model.

`lookup.py` is imported on first use, so programs that need no tokenizer do not load it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from tinsmith.client.waits import say

if TYPE_CHECKING:
    from tinsmith.client.tokenization.tokenizer import Tokenizer
    from tinsmith.types.training import GetInfoResponse

Names: TypeAlias = "tuple[str | None, str | None]"
GetInfo: TypeAlias = "Callable[[], Awaitable[GetInfoResponse | Names]]"


class TokenizerOfModel:
    """Loads the tokenizer of one client's model.

    The first caller asks the service for its id; concurrent callers wait for that answer. A failure
    is raised for all of them and not cached, so the next call asks again.
    """

    def __init__(self) -> None:
        # By process id: a forked child must not wait for its parent's request.
        self._answers: dict[int, Future[Names]] = {}

    async def get_async(self, get_info: GetInfo) -> Tokenizer:
        """Load the tokenizer; each call returns a new handle. Runs on any event loop.

        Args:
            get_info: Asks the service; returns the response of `get_info`, or the names of model
                and tokenizer. Not stored: a bound method would keep its client alive.
        """
        model_name, tokenizer_id = await self._names(get_info)
        from tinsmith.client.tokenization.lookup import load_tokenizer

        say(f"loading the tokenizer of {tokenizer_id or model_name}")
        # Reading a large vocabulary takes a while.
        return await asyncio.to_thread(load_tokenizer, model_name, tokenizer_id)

    async def _names(self, get_info: GetInfo) -> Names:
        while True:
            mine: Future[Names] = Future()
            answer = self._answers.setdefault(os.getpid(), mine)
            if answer is mine:
                return await self._ask(mine, get_info)
            try:
                # Shielded: a cancelled caller must not cancel the request for the others.
                return await asyncio.shield(asyncio.wrap_future(answer))
            except asyncio.CancelledError:
                if not answer.cancelled():
                    raise
                # The caller that asked was cancelled: another one asks.

    async def _ask(self, answer: Future[Names], get_info: GetInfo) -> Names:
        try:
            names = _names_in(await get_info())
        except Exception as exc:
            self._answers.pop(os.getpid(), None)
            answer.set_exception(exc)
            raise
        except BaseException:
            self._answers.pop(os.getpid(), None)
            answer.cancel()
            raise
        answer.set_result(names)
        return names


def _names_in(info: GetInfoResponse | Names) -> Names:
    if isinstance(info, tuple):
        return info
    return info.model_data.model_name or info.model_name, info.model_data.tokenizer_id
