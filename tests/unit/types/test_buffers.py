from __future__ import annotations

import array
import copy
import ctypes
import math
import pickle
import struct
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import (
    MAX_IDS,
    Kind,
    LastList,
    Numbers,
    pack,
    rows,
    widen_bfloat16,
    widen_int32,
)

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
KINDS: list[Kind] = ["int32", "int64", "float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_the_right_kind_is_shared(kind: Kind) -> None:
    numbers = np.arange(6, dtype=kind).reshape(2, 3)

    held, shape = pack(numbers, kind)

    assert shape == [2, 3]
    assert np.shares_memory(np.frombuffer(held.memory, dtype=kind), numbers)
    assert np.shares_memory(held.numpy(), numbers)


def a_read_only_view(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = numbers.view()
    view.flags.writeable = False
    return view


READ_ONLY_VIEWS: list[Any] = [a_read_only_view, lambda numbers: numbers.data.toreadonly()]


@pytest.mark.parametrize("view_of", READ_ONLY_VIEWS, ids=["numpy", "memoryview"])
def test_a_read_only_view_of_writable_memory_is_copied(view_of: Any) -> None:
    numbers = np.array([1, 2, 3], dtype="int32")
    held, _ = pack(view_of(numbers), "int32")

    numbers[:] = 9

    assert held.tolist() == [1, 2, 3]


def test_immutable_bytes_are_shared() -> None:
    given = struct.pack("3i", 1, 2, 3)

    held, _ = pack(memoryview(given).cast("i"), "int32")

    assert isinstance(held.memory, memoryview)
    assert held.memory.obj is given


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype="int8"),
        np.array([1, 2, 3], dtype=">i8"),
        np.array([1, 2, 3], dtype="uint16"),
        np.array([1.0, 2.0, 3.0]),
        np.array([1, 9, 2, 9, 3, 9])[::2],
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 9, 2, 9, 3, 9])[::2],
        array.array("i", [1, 2, 3]),
        array.array("q", [1, 2, 3]),
        (ctypes.c_int * 3)(1, 2, 3),
        bytearray([1, 2, 3]),
        memoryview(bytes([1, 2, 3])),
        [np.int64(1), torch.tensor(2), 3.0],
        Numbers(struct.pack("3i", 1, 2, 3), "int32"),
    ],
    ids=lambda values: type(values).__name__,
)
def test_every_form_of_numbers_is_accepted(values: object) -> None:
    held, shape = pack(values, "int32")

    assert held.tolist() == [1, 2, 3]
    assert shape == [3]


@pytest.mark.parametrize("values", [None, 5, "123", {1, 2}, {"a": 1}, object(), iter([1])])
def test_a_value_without_numbers_is_a_type_error(values: object) -> None:
    with pytest.raises(TypeError, match="tokens must be a list"):
        pack(values, "int32", "tokens")


def test_a_buffer_of_a_foreign_format_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="format"):
        pack((ctypes.c_int * 2)(1, 2), "float32")


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1, 1.5], "int32", r"x\[1\] is 1.5"),
        ([1 << 31], "int32", r"x\[0\] is 2147483648, which does not fit"),
        ([-(1 << 63) - 1], "int64", "does not fit"),
        ([10**5000], "int64", "does not fit"),
        ([None], "float32", "not a valid float32"),
        (["one"], "float32", "not a valid float32"),
        ([math.nan], "int64", "not a valid int64"),
        ([[1, 2], [3]], "int64", "ragged"),
        ([[1], 2], "int64", "ragged"),
        ([1, [2]], "int64", "not a valid int64"),
        (np.array([1, 1 << 40]), "int32", r"x\[1\] is 1099511627776, which does not fit"),
        (np.array([[0.0, 1.5]]), "int64", r"x\[1\] is 1.5"),
        (np.array([math.nan]), "int32", "nan"),
        (np.array([1 << 63], dtype="uint64"), "int64", "does not fit"),
        (np.array(["one"]), "int64", "not of numbers"),
        (np.array([1j]), "float32", "not of numbers"),
        (torch.tensor([1 << 40]), "int32", "does not fit"),
    ],
)
def test_numbers_out_of_range_are_rejected_and_named(
    values: object, kind: Kind, message: str
) -> None:
    """Numpy alone would cut them into other numbers."""
    with pytest.raises(ValidationError, match=message):
        pack(values, kind, "x")


@pytest.mark.parametrize("values", [[1e39, -1e300], np.array([1e39, -1e300])])
def test_a_value_too_large_for_float32_becomes_infinite(values: object) -> None:
    assert pack(values, "float32")[0].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([], [0]),
        ([[], []], [2, 0]),
        ([[[1]], [[2]]], [2, 1, 1]),
        (np.zeros((3, 0, 2)), [3, 0, 2]),
        (np.array(5), []),
    ],
)
def test_the_shape_of_nested_values_is_returned(values: object, shape: list[int]) -> None:
    assert pack(values, "float32")[1] == shape


def test_a_tensor_that_requires_grad_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="detach"):
        pack(torch.ones(2, requires_grad=True), "float32")


def test_a_change_to_a_shared_array_is_visible() -> None:
    numbers = np.zeros(3, dtype="float32")
    held, _ = pack(numbers, "float32")

    numbers[1] = 5

    assert held.tolist() == [0, 5, 0]


def test_equality_compares_numbers_bit_for_bit() -> None:
    nan = Numbers(struct.pack("f", math.nan), "float32")

    assert nan == Numbers(struct.pack("f", math.nan), "float32")
    assert Numbers(struct.pack("f", 0.0), "float32") != Numbers(struct.pack("f", -0.0), "float32")
    assert Numbers(bytes(8), "int64") != Numbers(bytes(8), "int32")
    assert Numbers(bytes(8), "int64") == Numbers(memoryview(bytearray(8)), "int64")
    assert hash(Numbers(bytes(8), "int64")) == hash(Numbers(memoryview(bytes(8)), "int64"))
    assert nan != 5


def test_bytes_that_are_not_a_whole_number_of_items_are_rejected() -> None:
    with pytest.raises(ValidationError, match="7 bytes"):
        Numbers(bytes(7), "int32")


def test_a_slice_shares_memory() -> None:
    memory = bytearray(struct.pack("4i", 1, 2, 3, 4))

    part = Numbers(memoryview(memory), "int32").slice(1, 3)
    memory[4] = 9

    assert part.tolist() == [9, 3]
    assert len(part) == 2


def test_numbers_survive_pickling_and_copying() -> None:
    held, _ = pack(np.arange(3), "int64")

    assert pickle.loads(pickle.dumps(held)) == held
    assert copy.deepcopy(held) == held
    assert copy.copy(held) == held


def test_a_repr_stays_short() -> None:
    assert repr(Numbers(bytes(8_000_000), "int64")) == (
        "Numbers(int64, [0, 0, 0, 0, 0, 0, 0, 0, … 999992 more])"
    )
    assert repr(Numbers(b"", "int32")) == "Numbers(int32, [])"


def test_an_array_made_from_received_bytes_is_writable() -> None:
    values = Numbers(bytes(8), "int32").numpy()

    values[0] = 5

    assert values.tolist() == [5, 0]


def test_rows_split_numbers_into_equal_widths() -> None:
    numbers = Numbers(struct.pack("4i", 1, 2, 3, 4), "int32")

    assert list(rows(numbers, 2)) == [(1, 2), (3, 4)]


@given(st.lists(INT32))
def test_int32_is_widened_exactly(values: list[int]) -> None:
    packed = struct.pack(f"{len(values)}i", *values)

    for memory in (packed, memoryview(packed)):
        assert Numbers(widen_int32(memory), "int64").tolist() == values


@given(hnp.arrays("float32", hnp.array_shapes(max_dims=1)))
def test_bfloat16_is_widened_exactly(values: Any) -> None:
    tensor = torch.from_numpy(values).bfloat16()
    memory = tensor.view(torch.int16).numpy().tobytes()

    wide = Numbers(widen_bfloat16(memory), "float32").numpy()

    assert wide.tobytes() == tensor.float().numpy().tobytes()


@pytest.mark.parametrize("widen", [widen_int32, widen_bfloat16])
def test_widening_uses_little_more_memory_than_its_result(widen: Any) -> None:
    memory = bytes(range(256)) * 4096

    tracemalloc.start()
    wide = widen(memory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1.6 * len(wide)


@given(st.lists(INT32, max_size=20))
def test_lists_round_trip(values: list[int]) -> None:
    assert pack(values, "int32")[0].tolist() == values
    assert pack(values, "int64")[0].tolist() == values


def test_a_long_list_uses_less_than_four_times_the_memory_of_its_numbers() -> None:
    values = [1.5] * 1_000_000

    tracemalloc.start()
    held, _ = pack(values, "float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 * len(held.memory)


def kept_of(last: LastList, values: object) -> object:
    """What is found for values that were packed last."""
    copied = last.copied(values)
    numbers, _ = pack(copied, "int32")
    last.keep(numbers, copied)
    return last.take(numbers)


def a_wanted_one() -> LastList:
    last = LastList()
    last.take(pack([0], "int32")[0])
    return last


def test_nothing_is_cached_before_it_is_requested() -> None:
    assert kept_of(LastList(), [1, 2]) is None


def test_the_cached_list_is_returned_once_for_its_own_numbers() -> None:
    last = a_wanted_one()
    values = last.copied([1, 2])
    numbers, _ = pack(values, "int32")
    last.keep(numbers, values)

    assert last.take(pack([1, 2], "int32")[0]) is None  # equal, but another
    assert last.take(numbers) == (1, 2)
    assert last.take(numbers) is None


def test_the_cached_list_does_not_change_with_the_caller_s_list() -> None:
    last, mine = a_wanted_one(), [1, 2]
    values = last.copied(mine)
    numbers, _ = pack(values, "int32")
    last.keep(numbers, values)

    mine[0] = 9

    assert last.take(numbers) == (1, 2)


def test_very_long_lists_and_non_lists_are_not_cached() -> None:
    last = a_wanted_one()

    assert kept_of(last, range(3)) is None
    assert kept_of(last, [7] * (MAX_IDS + 1)) is None
    assert kept_of(last, [7] * MAX_IDS) == (7,) * MAX_IDS


class Element:
    """Of an array, whose memory it holds."""

    def __index__(self) -> int:
        return 7


def test_array_elements_are_not_cached() -> None:
    last, elements = a_wanted_one(), [Element(), Element()]
    held = weakref.ref(elements[0])

    values = last.copied(elements)
    last.keep(pack(values, "int32")[0], values)
    del elements, values

    assert held() is None
