"""Getting the tokenizer of a model: by name, once per process, from any thread or event loop.

`tokenization/names.py` decides which it is, `tokenization/files.py` reads it and keeps it, and each
caller gets a handle of its own (`tokenization/tokenizer.py`). A tokenizer of the package
`transformers`, or of `tml_tokenizers`, is made instead where the caller or the table asks for one;
it is shared by all who ask, as those packages have it.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from tinsmith.client.tokenization.files import KEPT_TOKENIZERS, forget_parts, load_parts
from tinsmith.client.tokenization.names import (
    TABLE_VARIABLE,
    Kind,
    Table,
    TokenizerSource,
    resolve,
)
from tinsmith.client.tokenization.single_flight import SingleFlightCache
from tinsmith.client.tokenization.tokenizer import Tokenizer
from tinsmith.errors import TokenizerError

__all__ = [
    "Tokenizer",
    "forget_tokenizers",
    "load_tokenizer",
    "load_tokenizer_async",
]

_of_packages: SingleFlightCache[TokenizerSource, Any] = SingleFlightCache(KEPT_TOKENIZERS)


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
            given it is ours, save for the few models whose tokenizers are programs, and those of
            Thinking Machines, which come with the package `tml_tokenizers`.
        table: Names and their tokenizers, before those of `TINSMITH_TOKENIZERS` and our own.
        copy_per_thread: See `Tokenizer`.

    Returns:
        A new handle; or the one shared tokenizer of another package, which has the same calls.

    Raises:
        TokenizerError: No tokenizer could be found or read.
        ImportError: A package is missing; the message names it.
    """
    source = resolve(model_name, tokenizer_id, revision=revision, kind=kind, table=table)
    if source.kind == "tokenizers":
        return Tokenizer(load_parts(source), copy_per_thread=copy_per_thread)
    load = _load_with_transformers if source.kind == "transformers" else _load_with_tml_tokenizers
    shared: Tokenizer = _of_packages.get(source, lambda: load(source))
    return shared


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
    _of_packages.clear()


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


def _load_with_tml_tokenizers(source: TokenizerSource) -> Any:
    try:
        package = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ImportError as exc:
        raise TokenizerError(
            f"tokenizer {source.id!r} needs the package tml_tokenizers",
            remedy=f"install it, or map the name to a tokenizer you have with {TABLE_VARIABLE}",
        ) from exc
    found = package.get_tinker_tokenizer(source.id)
    return _load_with_transformers(source) if found is None else found
