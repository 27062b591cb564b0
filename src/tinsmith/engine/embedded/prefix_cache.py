"""The prefix cache, and the memory budget that it shares with running sequences.

KV caches of earlier prompts serve prompts with the same prefix. A prompt is prefilled in chunks
that end at multiples of `CHUNK_TOKENS`. The exact bits of a token's keys and values depend on the
tokens before it and on the bounds of its chunk. So the cache returns whole chunks, or a whole
prompt to an identical one, and results do not depend on its content.

Keys and values of sampled tokens are not reused, as they were computed one by one.

Used by one thread.

`KvMemory` is the budget. Sequences reserve a page at a time. Unreserved memory holds the prefix
cache, which is evicted when it is needed. `prefill_queue.py` makes sure that some sequence can
always continue.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.kv_cache import PAGE_TOKENS, KvBuffer, whole_pages

Array: TypeAlias = "np.ndarray[Any, Any]"

CHUNK_TOKENS = 128
"""From so many rows on, matmuls run at nearly full speed."""
MOST_PROMPTS = 1024
"""Maximum entries; for small models memory alone would allow so many that scans are slow."""
PromptKey: TypeAlias = tuple[int, int, bytes]
"""Number of the weights, number of tokens, and their digest."""


class CachedPrompt:
    """A prompt's KV cache, and its last hidden state."""

    def __init__(self, keys: list[PromptKey], kv: KvBuffer, last_1D: Tensor) -> None:
        self.keys = keys
        """The keys of its prefixes; see `prompt_keys`."""
        self.weights, self.length, _ = keys[-1]
        self.kv = kv
        self.last_1D = last_1D
        self.users = 0
        """Samples that use the buffer as it is."""
        self.is_lent = False
        """A sequence appends to the buffer, so it may be copied but not shared."""
        self.is_evicted = False
        """Evicted from the index; freed with its last user."""
        self.counted_bytes = 0
        """The bytes that the cache accounts for."""

    @property
    def bytes(self) -> int:
        """Memory that no user accounts for."""
        return 0 if self.is_lent else self.kv.bytes

    @property
    def is_unused(self) -> bool:
        """Whether it can be evicted."""
        return not self.users and not self.is_lent


class PrefixCache:
    """KV caches of prompts by prefix; evicts the least recently used."""

    def __init__(self) -> None:
        self.bytes = 0
        """Total size."""
        self._found: dict[PromptKey, CachedPrompt] = {}
        self._prompts: OrderedDict[int, CachedPrompt] = OrderedDict()
        self._has_evicted_in_use = False
        """Whether evicted prompts are still in use."""

    @property
    def used_bytes(self) -> int:
        """Size of the prompts that cannot be evicted now."""
        return sum(one.bytes for one in self._prompts.values() if not one.is_unused)

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, keys: list[PromptKey], most: int) -> tuple[CachedPrompt, int] | None:
        """The cached prompt with the longest usable prefix, and the length of that.

        Args:
            keys: The keys of the new prompt.
            most: Maximum tokens to take from the cache.
        """
        for key in reversed(keys):
            prompt, end = self._found.get(key), key[1]
            if prompt is None or end > most:
                continue
            # A longer cached prompt does not have the last hidden state of this one.
            if key is keys[-1] and prompt.length != end:
                continue
            self._prompts.move_to_end(id(prompt))
            return prompt, end
        return None

    def add(self, prompt: CachedPrompt) -> None:
        """Add a prompt."""
        self._prompts[id(prompt)] = prompt
        self.count(prompt)
        for key in prompt.keys:
            self._found[key] = prompt
        if len(self._prompts) > MOST_PROMPTS:
            unused = (one for one in self._prompts.values() if one.is_unused)
            self.remove(next(unused, prompt))

    def count(self, prompt: CachedPrompt) -> None:
        """Update the accounted size of a prompt."""
        if id(prompt) in self._prompts:
            self.bytes += prompt.bytes - prompt.counted_bytes
            prompt.counted_bytes = prompt.bytes

    def remove(self, prompt: CachedPrompt) -> None:
        """Evict a prompt. Its memory counts for as long as it is used."""
        prompt.is_evicted = True
        if not prompt.is_unused:
            self._has_evicted_in_use = True
        elif self._prompts.pop(id(prompt), None) is not None:
            self.bytes -= prompt.counted_bytes
        for key in prompt.keys:
            if self._found.get(key) is prompt:
                del self._found[key]

    def forget(self, weights: int) -> None:
        """Evict all prompts of these weights."""
        for prompt in list(self._prompts.values()):
            if prompt.weights == weights:
                self.remove(prompt)

    def shrink(self, most_bytes: int) -> bool:
        """Evict unused prompts down to `most_bytes`; whether that was enough."""
        if self.bytes <= most_bytes and not self._has_evicted_in_use:
            return True  # the common case; scanning many prompts is slow
        self._has_evicted_in_use = False
        for prompt in list(self._prompts.values()):
            if prompt.is_evicted or (prompt.is_unused and self.bytes > most_bytes):
                self.remove(prompt)
        return self.bytes <= most_bytes


def prompt_keys(weights: int, tokens: Array) -> list[PromptKey]:
    """A key for each prefix of whole chunks, and for the whole prompt."""
    keys: list[PromptKey] = []
    digest = b""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        digest = hashlib.blake2b(digest + chunk.tobytes(), digest_size=16).digest()
        keys.append((weights, start + len(chunk), digest))
    return keys


def shared_tokens(one: Array, other: Array, most: int) -> int:
    """Tokens of the first prompt that can be reused from the second."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    common = int(differing[0]) if len(differing) else length
    if common == len(one) == len(other) and most >= common:
        return common
    return min(common, most, len(one) - 1) // CHUNK_TOKENS * CHUNK_TOKENS


class KvMemory:
    """Accounts for the bytes of all KV buffers. Used by one thread."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, limit_bytes: int) -> None:
        heads = 2 * len(architecture.layers) * architecture.kv_heads
        self.token_bytes = heads * architecture.head_size * dtype.itemsize
        self.limit_bytes = limit_bytes
        self.cache = PrefixCache()
        self.taken_bytes = 0
        """Bytes reserved by samples."""

    def bytes_for(self, tokens: int) -> int:
        """Upper bound for a buffer of so many tokens, which grows by pages and by an eighth."""
        return (tokens * 9 // 8 + PAGE_TOKENS) * self.token_bytes

    def tokens_in(self, size: int) -> int:
        """Tokens that a buffer of so many bytes can hold at least."""
        return max(0, (size // self.token_bytes - PAGE_TOKENS) * 8 // 9)

    def growth(self, kv: KvBuffer, length: int) -> int:
        """Additional bytes of a buffer that grows to so many tokens."""
        return (kv.room_for(length) - kv.room) * self.token_bytes

    def pages(self, tokens: int) -> int:
        """Bytes of a new buffer for so many tokens."""
        return whole_pages(tokens) * self.token_bytes

    def try_reserve(self, size: int, spare: int = 0) -> bool:
        """Reserve bytes, evicting cached prompts if needed; False if there is no room.

        Args:
            size: In bytes.
            spare: Bytes that must remain free or evictable.
        """
        left = self.limit_bytes - self.taken_bytes - size
        if self.cache.bytes > left - spare and self.cache.used_bytes > left - spare:
            return False
        self.cache.shrink(left)
        self.taken_bytes += size
        return True

    def free(self, size: int) -> None:
        """Return reserved bytes."""
        self.taken_bytes -= size
        self.trim()

    def trim(self) -> None:
        """Shrink the prefix cache to the unreserved memory."""
        self.cache.shrink(self.limit_bytes - self.taken_bytes)
