"""Vectors that are used again."""

from __future__ import annotations

import torch

from tinsmith.engine.model.optimizer import VectorPool


def test_a_returned_vector_is_reused_for_the_same_size_and_dtype() -> None:
    pool = VectorPool()
    given = torch.zeros(100)
    pool.give(given)

    others = pool.take(torch.ones(99)), pool.take(torch.ones(100, dtype=torch.bfloat16))
    first, second = pool.take(torch.ones(100)), pool.take(torch.ones(100))

    assert first is given
    assert all(one is not given for one in (*others, second))
    assert [one.shape[0] for one in (*others, second)] == [99, 100, 100]


def test_the_pool_is_bounded_and_evicts_the_oldest_first() -> None:
    pool = VectorPool(most_bytes=800)
    oldest, *later = (torch.zeros(100) for _ in range(3))

    pool.give(oldest, *later)

    assert {id(pool.take(oldest)) for _ in range(2)} == {id(one) for one in later}
    assert pool.take(oldest) is not oldest
