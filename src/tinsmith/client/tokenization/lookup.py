"""Getting the tokenizer of a model: by name, once per process, from any thread or event loop.

`tokenization/names.py` decides which it is, `tokenization/files.py` reads it and keeps it, and each
caller gets a handle of its own (`tokenization/tokenizer.py`). A tokenizer of the package
`transformers` is made instead where the caller or the table asks for one; it is shared by all who
ask, as that package has it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from tinsmith.client.tokenization.files import KEPT_TOKENIZERS, forget_parts, load_parts
from tinsmith.client.tokenization.names import Kind, Table, TokenizerSource, resolve
from tinsmith.client.tokenization.single_flight import SingleFlightCache
from tinsmith.client.tokenization.tokenizer import Tokenizer
from tinsmith.client.waits import say
from tinsmith.errors import TokenizerError

if TYPE_CHECKING:
    from tinsmith.types.training import GetInfoResponse

__all__ = [
    "Tokenizer",
    "TokenizerOfModel",
    "forget_tokenizers",
    "load_tokenizer",
    "load_tokenizer_async",
]

Names: TypeAlias = "tuple[str | None, str | None]"
GetInfo: TypeAlias = "Callable[[], Awaitable[GetInfoResponse | str]]"

_of_transformers: SingleFlightCache[TokenizerSource, Any] = SingleFlightCache(KEPT_TOKENIZERS)


def load_tokenizer(
    model_name: str | None,
    tokenizer_id: str | None = None,
    *,
    revision: str | None = None,
    kind: Kind | None = None,
    table: Table | None = None,
    copy_per_thread: bool = False,
) -> Tokenizer:
    """The tokenizer of a model, loaded on first use and kept.

    Args:
        model_name: The model's name, a tokenizer's, or a directory.
        tokenizer_id: What the server says the tokenizer is; comes before the name.
        revision: A commit, branch or tag on the hub.
        kind: `"transformers"` for a tokenizer of that package, `"tokenizers"` for ours. Unless
            given it is ours, save for the few models whose tokenizers are programs.
        table: Names and their tokenizers, before those of `TINSMITH_TOKENIZERS` and our own.
        copy_per_thread: See `Tokenizer`.

    Returns:
        A new handle; or the one shared tokenizer of `transformers`, which has the same calls.

    Raises:
        TokenizerError: No tokenizer could be found or read.
        ImportError: A package is missing; the message names it.
    """
    source = resolve(model_name, tokenizer_id, revision=revision, kind=kind, table=table)
    if source.kind == "transformers":
        shared: Tokenizer = _of_transformers.get(source, lambda: _load_with_transformers(source))
        return shared
    return Tokenizer(load_parts(source), copy_per_thread=copy_per_thread)


async def load_tokenizer_async(
    model_name: str | None,
    tokenizer_id: str | None = None,
    *,
    revision: str | None = None,
    kind: Kind | None = None,
    table: Table | None = None,
    copy_per_thread: bool = False,
) -> Tokenizer:
    """As `load_tokenizer`, on a thread of its own: reading a large vocabulary takes a while."""
    return await asyncio.to_thread(
        load_tokenizer,
        model_name,
        tokenizer_id,
        revision=revision,
        kind=kind,
        table=table,
        copy_per_thread=copy_per_thread,
    )


def forget_tokenizers() -> None:
    """Let go of every tokenizer that is kept, so that the next use reads its files again."""
    forget_parts()
    _of_transformers.clear()


def _load_with_transformers(source: TokenizerSource) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as exc:
        raise ImportError(
            f"tokenizer {source.id!r} needs a package: pip install transformers"
        ) from exc
    options: dict[str, Any] = {"revision": source.revision} if source.revision else {}
    if source.trust_remote_code:
        options["trust_remote_code"] = True
    try:
        return AutoTokenizer.from_pretrained(source.id, use_fast=True, **options)
    except (OSError, ValueError) as exc:
        raise TokenizerError(f"transformers could not load {source.id!r}: {exc}") from exc


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
            get_info: Asks the service; gives what `get_info` answers, or just a base model's name.
                Not kept: a client's own method would keep the client alive.
        """
        model_name, tokenizer_id = await self._names(get_info)
        say(f"the files of the tokenizer of {tokenizer_id or model_name}")
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


def _names_in(info: GetInfoResponse | str) -> Names:
    if isinstance(info, str):
        return info, None
    return info.model_data.model_name or info.model_name, info.model_data.tokenizer_id
