"""Keys and values of prompts that were read, for prompts that begin alike.

A prompt is read in chunks that are cut at whole multiples of `CHUNK_TOKENS`, counted from its
beginning. What a token's keys and values are, to the last bit, depends on the tokens before it and
on where its chunk begins and ends. So the cache gives out whole chunks, or a whole prompt to one
that is the same; then a sample does not depend on what the cache held.

Keys and values of sampled tokens are not reused: they were computed one by one.

Used by one thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from tinsmith.model.kv_cache import Run

Array: TypeAlias = "np.ndarray[Any, Any]"

CHUNK_TOKENS = 128
"""Matrices are multiplied at nearly full speed from so many rows on."""


MOST_PROMPTS = 1024
"""Of small models memory holds so many that looking through them would take long."""
PromptKey: TypeAlias = tuple[int, int, bytes]
"""The weights, how many tokens, and the digest of these."""


class ReadPrompt:
    """A prompt, what was kept of it, and the row that the first sampled token comes from."""

    def __init__(self, keys: list[PromptKey], run: Run, last_1D: Tensor) -> None:
        self.keys = keys
        """What it is found by; see `prompt_keys`."""
        self.weights, self.length, _ = keys[-1]
        self.run = run
        self.last_1D = last_1D
        self.users = 0
        """Samples that read the run as it is."""
        self.is_lent = False
        """A sequence adds its own tokens to the run, which may be copied and not shared."""
        self.is_forgotten = False
        """It is not found any more, and goes with its last user."""
        self.counted_bytes = 0
        """What the cache has counted of it."""

    @property
    def bytes(self) -> int:
        """What it takes beside what its users account for."""
        return 0 if self.is_lent else self.run.bytes

    @property
    def is_unused(self) -> bool:
        """Whether it is only here in case it comes again."""
        return not self.users and not self.is_lent


class PrefixCache:
    """See the top of the module. What was not used for longest goes first."""

    def __init__(self) -> None:
        self.bytes = 0
        """What all of it takes."""
        self._found: dict[PromptKey, ReadPrompt] = {}
        self._prompts: OrderedDict[int, ReadPrompt] = OrderedDict()
        self._has_forgotten = False
        """Some prompts are here for their users alone."""

    @property
    def used_bytes(self) -> int:
        """What is taken by prompts that cannot go now."""
        return sum(one.bytes for one in self._prompts.values() if not one.is_unused)

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, keys: list[PromptKey], most: int) -> tuple[ReadPrompt, int] | None:
        """The prompt that has most of the beginning of another, and how much of it can be used.

        Args:
            keys: Those of the prompt to read.
            most: How many tokens may come from the cache.
        """
        for key in reversed(keys):
            prompt, end = self._found.get(key), key[1]
            if prompt is None or end > most:
                continue
            # The last row is not that of the cached prompt, if that goes on.
            if key is keys[-1] and prompt.length != end:
                continue
            self._prompts.move_to_end(id(prompt))
            return prompt, end
        return None

    def add(self, prompt: ReadPrompt) -> None:
        """Keep a prompt."""
        self._prompts[id(prompt)] = prompt
        self.count(prompt)
        for key in prompt.keys:
            self._found[key] = prompt
        if len(self._prompts) > MOST_PROMPTS:
            unused = (one for one in self._prompts.values() if one.is_unused)
            self.remove(next(unused, prompt))

    def count(self, prompt: ReadPrompt) -> None:
        """Take note of what a prompt takes now."""
        if id(prompt) in self._prompts:
            self.bytes += prompt.bytes - prompt.counted_bytes
            prompt.counted_bytes = prompt.bytes

    def remove(self, prompt: ReadPrompt) -> None:
        """Find a prompt no more. It counts for as long as it is used."""
        prompt.is_forgotten = True
        if not prompt.is_unused:
            self._has_forgotten = True
        elif self._prompts.pop(id(prompt), None) is not None:
            self.bytes -= prompt.counted_bytes
        for key in prompt.keys:
            if self._found.get(key) is prompt:
                del self._found[key]

    def forget(self, weights: int) -> None:
        """Forget all prompts that were read with these weights."""
        for prompt in list(self._prompts.values()):
            if prompt.weights == weights:
                self.remove(prompt)

    def shrink(self, most_bytes: int) -> bool:
        """Forget unused prompts until no more is taken; whether that was enough."""
        if self.bytes <= most_bytes and not self._has_forgotten:
            return True  # most often; looking through many prompts takes long
        self._has_forgotten = False
        for prompt in list(self._prompts.values()):
            if prompt.is_forgotten or (prompt.is_unused and self.bytes > most_bytes):
                self.remove(prompt)
        return self.bytes <= most_bytes


def prompt_keys(weights: int, tokens: Array) -> list[PromptKey]:
    """A key for each beginning of whole chunks, and for the whole."""
    keys: list[PromptKey] = []
    digest = b""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        digest = hashlib.blake2b(digest + chunk.tobytes(), digest_size=16).digest()
        keys.append((weights, start + len(chunk), digest))
    return keys


def shared_tokens(one: Array, other: Array, most: int) -> int:
    """How much of the first prompt can be reused from the second, once that is read."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    common = int(differing[0]) if len(differing) else length
    if common == len(one) == len(other) and most >= common:
        return common
    return min(common, most, len(one) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
