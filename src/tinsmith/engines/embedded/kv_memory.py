"""How much memory the keys and values of samples may take, and who has how much of it.

Sequences ask for a page at a time. What nobody asked for holds prompts that may come again; they
go when it is needed. `prompt_line.py` sees to it that somebody can always go on.
"""

from __future__ import annotations

import torch

from tinsmith.engines.embedded.prefix_cache import PrefixCache
from tinsmith.model.architecture import Architecture
from tinsmith.model.kv_cache import PAGE_TOKENS, Run, whole_pages


class KvMemory:
    """See the top of the module. Used by one thread."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, limit_bytes: int) -> None:
        heads = 2 * len(architecture.layers) * architecture.kv_heads
        self.token_bytes = heads * architecture.head_size * dtype.itemsize
        self.limit_bytes = limit_bytes
        self.cache = PrefixCache()
        self.taken_bytes = 0
        """What samples have asked for."""

    def bytes_for(self, tokens: int) -> int:
        """What a run of so many tokens takes at most: runs grow by pages and by an eighth."""
        return (tokens * 9 // 8 + PAGE_TOKENS) * self.token_bytes

    def tokens_in(self, size: int) -> int:
        """How many tokens a run of so many bytes has room for, at least."""
        return max(0, (size // self.token_bytes - PAGE_TOKENS) * 8 // 9)

    def growth(self, run: Run, length: int) -> int:
        """How many bytes more a run takes when it is to hold so many tokens."""
        return (run.room_for(length) - run.room) * self.token_bytes

    def pages(self, tokens: int) -> int:
        """What a run takes that is made for so many tokens."""
        return whole_pages(tokens) * self.token_bytes

    def try_take(self, size: int, spare: int = 0) -> bool:
        """Have so many bytes, if there is room or the cache can make it.

        Args:
            size: In bytes.
            spare: So much has to be left over, or held by prompts that nobody uses.
        """
        left = self.limit_bytes - self.taken_bytes - size
        if self.cache.bytes > left - spare and self.cache.used_bytes > left - spare:
            return False
        self.cache.shrink(left)
        self.taken_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Let others have so many bytes."""
        self.taken_bytes -= size
        self.trim()

    def trim(self) -> None:
        """See to it that the cache takes no more than is left."""
        self.cache.shrink(self.limit_bytes - self.taken_bytes)
