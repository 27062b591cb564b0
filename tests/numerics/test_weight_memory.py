"""Where packed weights lie."""

from __future__ import annotations

from tinsmith.model.kernels.weight_memory import PIECE_NUMBERS, WeightMemory


def test_matrices_lie_behind_each_other_and_begin_at_cache_lines() -> None:
    memory = WeightMemory()

    first, second, third = memory.take(100), memory.take(7), memory.take(32)

    assert [len(one) for one in (first, second, third)] == [100, 7, 32]
    assert second.data_ptr() - first.data_ptr() == 112 * 4
    assert third.data_ptr() - second.data_ptr() == 16 * 4
    assert first.data_ptr() % 64 == 0


def test_a_matrix_that_does_not_fit_in_what_is_left_has_another_piece() -> None:
    memory = WeightMemory()
    first = memory.take(PIECE_NUMBERS - 16)

    fits, does_not = memory.take(16), memory.take(17)

    assert fits.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert does_not.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_matrix_larger_than_a_piece_has_one_of_its_own_size() -> None:
    memory = WeightMemory()

    large = memory.take(PIECE_NUMBERS + 1)
    after = memory.take(16)

    assert len(large) == PIECE_NUMBERS + 1
    assert after.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
