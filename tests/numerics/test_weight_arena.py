"""Where packed weights lie."""

from __future__ import annotations

from tinsmith.engine.model.kernels.weight_arena import ALLOCATION_NUMBERS, WeightArena


def test_matrices_are_contiguous_and_aligned_to_cache_lines() -> None:
    memory = WeightArena()

    first, second, third = memory.take(100), memory.take(7), memory.take(32)

    assert [len(one) for one in (first, second, third)] == [100, 7, 32]
    assert second.data_ptr() - first.data_ptr() == 112 * 4
    assert third.data_ptr() - second.data_ptr() == 16 * 4
    assert first.data_ptr() % 64 == 0


def test_a_matrix_that_does_not_fit_starts_another_allocation() -> None:
    memory = WeightArena()
    first = memory.take(ALLOCATION_NUMBERS - 16)

    fits, does_not = memory.take(16), memory.take(17)

    assert fits.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert does_not.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_matrix_larger_than_an_allocation_has_one_of_its_own_size() -> None:
    memory = WeightArena()

    large = memory.take(ALLOCATION_NUMBERS + 1)
    after = memory.take(16)

    assert len(large) == ALLOCATION_NUMBERS + 1
    assert after.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
