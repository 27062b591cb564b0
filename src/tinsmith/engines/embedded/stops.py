"""Where a sampled sequence ends: at a token id, or where its text holds a stop text.

A stop is part of the sequence: the token that is the stop, or that completes the stop text, is its
last one. Whatever the same token says after the stop text is part of it too, since tokens are not
cut. A sequence also ends at the model's end-of-sequence tokens, but for `stop` `[]`, which ends it
at nothing.

Text is read as it comes. A character may be spread over several tokens, and then counts once it is
whole; the decoders of some models take away a space at the beginning, so a token is read together
with the few before it, those of the prompt included. Special tokens read as they are written, so
that a stop text may be one. A stop text that begins in the prompt does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.errors import ValidationError
from tinsmith.types.sampling import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""How many tokens of the prompt are read before the first that is drawn."""
CHARACTER_TOKENS = 4
"""Over how many tokens a character may be spread: each has a byte of it at least."""
MOST_UNREAD = 2 * CHARACTER_TOKENS
"""How many tokens may wait for a character to become whole; bytes before these never will."""
_BROKEN = "\ufffd"
"""Stands for bytes that are no whole character (yet)."""


class StopRule:
    """The stops of one request."""

    def __init__(
        self, token_ids: frozenset[int], texts: tuple[str, ...], tokenizer: Tokenizer | None
    ) -> None:
        self.token_ids = token_ids
        self.texts = texts
        self._tokenizer = tokenizer

    def follow(self, prompt: Sequence[int]) -> StopText | None:
        """What reads the text of a new sequence; None if no stop is a text."""
        if not self.texts:
            return None
        assert self._tokenizer is not None
        return StopText(self._tokenizer, self.texts, prompt[-CONTEXT_TOKENS:])


def stop_rule(
    params: SamplingParams, eos_tokens: Sequence[int], tokenizer_folder: Path | None
) -> StopRule:
    """The stops that a request asks for.

    Args:
        params: Those of the request.
        eos_tokens: What ends a sequence of the model, unless nothing is to end it.
        tokenizer_folder: Where the model's `tokenizer.json` is; None if it has none.

    Raises:
        ValidationError: A stop is a text, and there is no tokenizer to read tokens with.
    """
    if params.stop is None:
        return StopRule(frozenset(eos_tokens), (), None)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = tuple(stop for stop in stops if isinstance(stop, str) and stop)
    token_ids = frozenset(stop for stop in stops if isinstance(stop, int))
    if stops:
        token_ids |= frozenset(eos_tokens)
    return StopRule(token_ids, texts, _tokenizer(tokenizer_folder) if texts else None)


class StopText:
    """Reads the text of one sequence, and says when it holds a stop."""

    def __init__(
        self, tokenizer: Tokenizer, texts: tuple[str, ...], context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._overlap = max(map(len, texts)) - 1
        self._tokens = list(context)
        self._read = len(self._tokens)
        """Tokens before this place are read; they are kept to read the next ones with."""
        self._before = self._decode(self._tokens).rstrip(_BROKEN)
        self._tail = ""
        """The end of what was read: a stop may begin in it."""

    def ends_with(self, token: int) -> bool:
        """Add the next token; whether the text now holds a stop."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        text = self._tail + whole.rstrip(_BROKEN)[len(self._before) :]
        if any(stop in text for stop in self._texts):
            return True
        if not whole.endswith(_BROKEN):
            self._set_read(len(self._tokens), text)
        elif len(self._tokens) - self._read >= MOST_UNREAD:
            settled = len(self._tokens) - CHARACTER_TOKENS
            text = self._decode(self._tokens[:settled])[len(self._before) :]
            self._set_read(settled, self._tail + text)
        return False

    def _set_read(self, settled: int, text: str) -> None:
        """Keep of what was read before what the next tokens are to be read with."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        del self._tokens[: self._read]
        self._read = settled - self._read
        self._before = self._decode(self._tokens[: self._read]).rstrip(_BROKEN)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _tokenizer(folder: Path | None) -> Tokenizer:
    if folder is None:
        raise ValidationError(
            "a stop is a text, and the model has no tokenizer to read its tokens with",
            remedy="give stops as token ids",
        )
    return _load(folder)


@functools.lru_cache(maxsize=16)
def _load(folder: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise ValidationError(
            "a stop is a text, and the package that reads tokens is not installed on the service",
            remedy="give stops as token ids, or install tinsmith[tokenizers] there",
        ) from exc
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:
        raise ValidationError(
            f"a stop is a text, and the model's tokenizer cannot be read: {exc}",
            remedy="give stops as token ids",
        ) from exc
