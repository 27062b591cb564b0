"""A client's way to the tokenizer of its model.

Whoever never asks for one loads nothing that reads tokenizers: `lookup.py` is imported on first
use.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from tinsmith.client.waits import say

if TYPE_CHECKING:
    from tinsmith.client.tokenization.names import Kind, Table
    from tinsmith.client.tokenization.tokenizer import Tokenizer
    from tinsmith.types.training import GetInfoResponse

Names: TypeAlias = "tuple[str | None, str | None]"
GetInfo: TypeAlias = "Callable[[], Awaitable[GetInfoResponse | Names]]"


class TokenizerOfModel:
    """One client's way to its model's tokenizer.

    The service is asked once, by whoever comes first; the others wait for that answer. A failure
    reaches all who wait and is forgotten, so that the next call asks again.

    Args:
        kind: See `load_tokenizer`.
        table: See `load_tokenizer`.
    """

    def __init__(self, *, kind: Kind | None = None, table: Table | None = None) -> None:
        self._kind = kind
        self._table = table
        # By process: a forked child must not wait for an answer that its parent asked for.
        self._answers: dict[int, Future[Names]] = {}

    async def get_async(self, get_info: GetInfo) -> Tokenizer:
        """The tokenizer; each call gives a new handle. Runs on any event loop.

        Args:
            get_info: Asks the service; gives what `get_info` answers, or the names of model and
                tokenizer. Not kept: a client's own method would keep the client alive.
        """
        model_name, tokenizer_id = await self._names(get_info)
        from tinsmith.client.tokenization.lookup import load_tokenizer_async

        say(f"loading the tokenizer of {tokenizer_id or model_name}")
        return await load_tokenizer_async(
            model_name, tokenizer_id, kind=self._kind, table=self._table
        )

    async def _names(self, get_info: GetInfo) -> Names:
        while True:
            mine: Future[Names] = Future()
            answer = self._answers.setdefault(os.getpid(), mine)
            if answer is mine:
                return await self._ask(mine, get_info)
            try:
                # Shielded: one who stops waiting must not take the answer from the others.
                return await asyncio.shield(asyncio.wrap_future(answer))
            except asyncio.CancelledError:
                if not answer.cancelled():
                    raise
                # It was the asker that was cancelled: somebody else asks.

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
