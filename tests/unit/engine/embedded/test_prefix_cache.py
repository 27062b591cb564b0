"""Which prompts are found again, and which are forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.embedded import prefix_cache
from tinsmith.engine.embedded.prefix_cache import (
    CHUNK_TOKENS,
    CachedPrompt,
    PrefixCache,
    prompt_keys,
    shared_tokens,
)
from tinsmith.engine.model.architecture import Architecture, LayerShape
from tinsmith.engine.model.kv_cache import KvBuffer

C = CHUNK_TOKENS
SHAPE = Architecture(
    name="test",
    vocabulary=10,
    hidden=4,
    inner=4,
    heads=1,
    kv_heads=1,
    head_size=4,
    max_context=4096,
    layers=(LayerShape(),),
    ropes=(),
    norm_epsilon=1e-5,
)


def _tokens(count: int, last: int = 0) -> np.ndarray[Any, Any]:
    tokens = np.arange(count, dtype=np.int32) % 7
    tokens[-1] = last
    return tokens


def _prompt(tokens: np.ndarray[Any, Any], weights: int = 0) -> CachedPrompt:
    run = KvBuffer(SHAPE, torch.float32, torch.device("cpu"))
    run.reserve(len(tokens))
    run.length = len(tokens)
    return CachedPrompt(prompt_keys(weights, tokens), run, torch.zeros(1, 4))


def test_whole_prompts_and_whole_chunks_are_found() -> None:
    """A prompt that goes on differently has the chunks before that."""
    cache, tokens = PrefixCache(), _tokens(3 * C + 5)
    kept = _prompt(tokens)
    cache.add(kept)
    other = tokens.copy()
    other[2 * C + 3] = 9

    assert cache.find(prompt_keys(0, tokens), len(tokens)) == (kept, 3 * C + 5)
    assert cache.find(prompt_keys(0, np.append(tokens, np.int32(1))), 9999) == (kept, 3 * C)
    assert cache.find(prompt_keys(0, other), 9999) == (kept, 2 * C)
    assert cache.find(prompt_keys(0, tokens[: C + 9]), 9999) == (kept, C)
    assert cache.find(prompt_keys(0, tokens[: C - 1]), 9999) is None
    assert cache.find(prompt_keys(0, other[::-1].copy()), 9999) is None


def test_a_lookup_returns_no_more_tokens_than_may_be_reused() -> None:
    """Rows that a question is about are computed."""
    cache, tokens = PrefixCache(), _tokens(2 * C + 5)
    kept = _prompt(tokens)
    cache.add(kept)

    assert cache.find(prompt_keys(0, tokens), 2 * C + 4) == (kept, 2 * C)
    assert cache.find(prompt_keys(0, tokens), 2 * C - 1) == (kept, C)
    assert cache.find(prompt_keys(0, tokens), C - 1) is None


def test_the_end_of_a_prompt_is_not_found_inside_a_longer_one() -> None:
    """The row that the first token comes from was not kept there."""
    cache, tokens = PrefixCache(), _tokens(2 * C + 5)
    kept = _prompt(tokens)
    cache.add(kept)

    assert cache.find(prompt_keys(0, tokens[: 2 * C]), 9999) == (kept, C)


def test_prompts_of_other_weights_are_not_found() -> None:
    """And go with their weights."""
    cache, tokens = PrefixCache(), _tokens(C)
    one, other = _prompt(tokens, 1), _prompt(tokens, 2)
    cache.add(one)
    cache.add(other)

    assert cache.find(prompt_keys(0, tokens), C) is None
    assert cache.find(prompt_keys(1, tokens), C) == (one, C)
    cache.forget(1)
    assert cache.find(prompt_keys(1, tokens), C) is None
    assert cache.find(prompt_keys(2, tokens), C) == (other, C)


def test_evicted_prompts_count_as_long_as_they_are_in_use() -> None:
    """They are not found, and go with their last user."""
    cache = PrefixCache()
    used, lent = _prompt(_tokens(C, 1)), _prompt(_tokens(C, 2))
    used.users, lent.is_lent = 1, True
    cache.add(used)
    cache.add(lent)

    cache.forget(0)

    assert cache.find(used.keys, C) is None
    assert cache.bytes == used.bytes
    used.users, lent.is_lent = 0, False
    assert cache.shrink(10 * used.bytes)
    assert len(cache) == cache.bytes == 0


def test_the_least_recently_used_prompt_is_evicted_unless_it_is_in_use() -> None:
    """Shrinking says whether it was enough."""
    cache = PrefixCache()
    prompts = [_prompt(_tokens(C, last)) for last in range(5)]
    for prompt in prompts:
        cache.add(prompt)
    size = prompts[0].bytes
    cache.find(prompts[0].keys, C)
    prompts[1].users = 1
    prompts[2].is_lent = True
    cache.count(prompts[2])

    assert cache.bytes == 4 * size  # the lent one is its sequence's to account for
    assert cache.shrink(2 * size)
    assert [cache.find(one.keys, C) is not None for one in prompts] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not cache.shrink(0)
    assert len(cache) == 2


def test_the_number_of_cached_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr(prefix_cache, "MOST_PROMPTS", 3)
    cache = PrefixCache()

    for last in range(7):
        cache.add(_prompt(_tokens(C, last)))

    assert len(cache) == 3
    assert cache.find(prompt_keys(0, _tokens(C, 6)), C) is not None


def test_a_prompt_that_does_not_fit_is_counted_but_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others are in use: it goes as soon as it is not."""
    monkeypatch.setattr(prefix_cache, "MOST_PROMPTS", 1)
    cache = PrefixCache()
    first, second = _prompt(_tokens(C, 1)), _prompt(_tokens(C, 2))
    first.users = second.users = 1

    cache.add(first)
    cache.add(second)

    assert cache.find(first.keys, C) is not None
    assert cache.find(second.keys, C) is None
    assert cache.bytes == first.bytes + second.bytes
    second.users = 0
    assert cache.shrink(10 * first.bytes)
    assert cache.bytes == first.bytes


def test_a_common_prefix_is_counted_in_whole_chunks() -> None:
    """Or is the whole, of two that are the same."""
    tokens = _tokens(2 * C + 5)
    other = tokens.copy()
    other[C + 9] = 9

    assert shared_tokens(tokens, tokens, 9999) == 2 * C + 5
    assert shared_tokens(tokens, tokens, 2 * C + 4) == 2 * C
    assert shared_tokens(tokens, other, 9999) == C
    assert shared_tokens(tokens[: 2 * C], tokens, 9999) == C
    assert shared_tokens(tokens, tokens[: 2 * C], 9999) == 2 * C
