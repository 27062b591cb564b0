"""Load the tokenizer of a model by name, once per process, from any thread or event loop.

`tokenization/names.py` resolves the name, `tokenization/tokenizer_files.py` reads and caches the
files, and each caller gets a handle of its own (`tokenization/tokenizer.py`). If the caller or the
table asks for a tokenizer of the package `transformers` or `tml_tokenizers`, that one is loaded
instead and shared by all callers.
"""

from __future__ import annotations

import importlib
from typing import Any

from tinsmith.client.tokenization.names import (
    TABLE_VARIABLE,
    Kind,
    Table,
    TokenizerSource,
    resolve,
)
from tinsmith.client.tokenization.tokenizer import Tokenizer
from tinsmith.client.tokenization.tokenizer_files import (
    KEPT_TOKENIZERS,
    SingleFlightCache,
    forget_parts,
    load_parts,
)
from tinsmith.errors import TokenizerError

__all__ = [
    "Tokenizer",
    "forget_tokenizers",
    "load_tokenizer",
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
    """Load the tokenizer of a model; cached after the first use.

    Args:
        model_name: The name of a model or tokenizer, or a directory.
        tokenizer_id: The tokenizer that the service reported; takes precedence over the name.
        revision: A commit, branch or tag on the hub.
        kind: `"transformers"` for a tokenizer of that package, `"tokenizers"` for ours. The default
            is ours, except for the few models whose tokenizers are code, and those of Thinking
            Machines, which come with the package `tml_tokenizers`.
        table: Tokenizers by name; takes precedence over `TINSMITH_TOKENIZERS` and the defaults.
        copy_per_thread: Give each thread a native tokenizer of its own.

    Returns:
        A new handle, or the shared tokenizer of another package, which has the same methods.

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


def forget_tokenizers() -> None:
    """Clear the cache of tokenizers, so that the next use reads the files again."""
    forget_parts()
    _of_packages.clear()


def _load_with_transformers(source: TokenizerSource) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as exc:
        raise ImportError(
            f"tokenizer {source.id!r} requires transformers; run `pip install transformers`"
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
            f"tokenizer {source.id!r} requires the package tml_tokenizers",
            remedy=f"install it, or map the name to a tokenizer you have with {TABLE_VARIABLE}",
        ) from exc
    found = package.get_tinker_tokenizer(source.id)
    return _load_with_transformers(source) if found is None else found
