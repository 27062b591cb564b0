"""Vectors that are used again."""

from __future__ import annotations

import torch

from tinsmith.model.spare_vectors import SpareVectors


def test_a_vector_that_was_given_is_taken_by_one_who_needs_its_size_and_type() -> None:
    spares = SpareVectors()
    given = torch.zeros(100)
    spares.give(given)

    others = spares.take(torch.ones(99)), spares.take(torch.ones(100, dtype=torch.bfloat16))
    first, second = spares.take(torch.ones(100)), spares.take(torch.ones(100))

    assert first is given
    assert all(one is not given for one in (*others, second))
    assert [one.shape[0] for one in (*others, second)] == [99, 100, 100]


def test_no_more_is_kept_than_may_be_and_the_oldest_goes_first() -> None:
    spares = SpareVectors(most_bytes=800)
    oldest, *later = (torch.zeros(100) for _ in range(3))

    spares.give(oldest, *later)

    assert {id(spares.take(oldest)) for _ in range(2)} == {id(one) for one in later}
    assert spares.take(oldest) is not oldest
