from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinsmith import TensorData
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types.record import to_plain
from tinsmith.types.tensors import tensor_from

MATRIX = TensorData(
    [5, 6, 7],
    "int64",
    [2, 4],
    sparse_crow_indices=[0, 1, 3],
    sparse_col_indices=[3, 0, 2],
)
DENSE_ROWS = [[0, 0, 0, 5], [6, 0, 7, 0]]


@pytest.mark.parametrize("dtype", [None, "float64", "int32", "", ["int64"]])
def test_a_dtype_is_needed(dtype: Any) -> None:
    with pytest.raises(TypeError, match="'int64' or 'float32'"):
        TensorData([1], dtype)


def test_a_list_has_no_shape_unless_one_is_given() -> None:
    assert TensorData([1, 2], "int64").shape is None
    assert TensorData([1, 2], "int64", (2, 1)).shape == [2, 1]
    assert TensorData([[1, 2]], "int64").shape == [1, 2]
    assert TensorData(np.ones((2, 3)), "float32").shape == [2, 3]


def test_empty_data_is_an_empty_tensor() -> None:
    assert TensorData(dtype="float32").data == []


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([3], "has 3 values, but data has 2"),
        ([-1, -2], "negative"),
        ([2.0], "expected integers"),
        ([math.inf], "expected integers"),
        (["2"], "expected integers"),
        ("2", "expected integers"),
        (5, "expected integers"),
        ([1 << 63], "exceeds 64 bits"),
        ([10**5000], "exceeds 64 bits"),
        ([1] * 33, "dimensions"),
        ([1 << 40] * 1_000_000, "dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shape_that_does_not_match_the_data_is_rejected(shape: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorData([1, 2], "int64", shape)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([1.5], dtype="float16"), "float32"),
        (np.array([1.5], dtype="float32"), "float32"),
        (np.array([1.5]), "float32"),
        (np.array([1], dtype="int8"), "int64"),
        (np.array([1], dtype=">i4"), "int64"),
        (np.array([1]), "int64"),
        (np.array(5), "int64"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "int64"),
        (np.arange(6)[::-2], "int64"),
        (np.zeros((0, 3)), "float32"),
        (np.zeros((3, 0), dtype="int64"), "int64"),
        (np.broadcast_to(np.int64(3), (4,)), "int64"),
    ],
)
def test_numpy_arrays_round_trip_with_shape_and_values(array: Any, dtype: str) -> None:
    tensor = TensorData.from_numpy(array)

    again = tensor.to_numpy()

    assert tensor.dtype == again.dtype == dtype
    assert again.shape == array.shape
    assert (again == array).all()
    assert tensor.tolist() == array.tolist()
    assert again.flags.writeable or not array.flags.writeable


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "bool", "complex64", "<U1", "object"])
def test_numpy_arrays_of_other_dtypes_are_rejected_with_a_remedy(dtype: str) -> None:
    with pytest.raises(ValueError, match="astype"):
        TensorData.from_numpy(np.zeros(2).astype(dtype))


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.tensor([1, 2], dtype=torch.int32), [1, 2]),
        (torch.tensor([1.5, 2]), [1.5, 2]),
        (torch.tensor([1.5, 2], dtype=torch.bfloat16), [1.5, 2]),
        (torch.tensor([1.5, 2], dtype=torch.float16), [1.5, 2]),
        (torch.tensor([1.5, 2], dtype=torch.float64), [1.5, 2]),
        (torch.tensor(3.5), 3.5),
        (torch.ones(2, 3).T, [[1, 1], [1, 1], [1, 1]]),
        (torch.ones(2, requires_grad=True).detach(), [1, 1]),
        (torch.zeros(2, 0), [[], []]),
    ],
)
def test_torch_tensors_round_trip(tensor: torch.Tensor, values: Any) -> None:
    held = TensorData.from_torch(tensor)

    assert held.tolist() == values
    assert held.to_torch().tolist() == values
    assert held.to_torch().shape == tensor.shape


def test_a_tensor_that_requires_grad_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="detach"):
        TensorData.from_torch(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_torch_tensors_of_other_dtypes_are_rejected(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected float or signed integer"):
        TensorData.from_torch(torch.ones(2, dtype=dtype))


def test_memory_is_shared_with_array_and_tensor() -> None:
    array, tensor = np.zeros(3, dtype="float32"), torch.zeros(3)

    of_array, of_tensor = TensorData.from_numpy(array), TensorData.from_torch(tensor)
    array[0] = tensor[0] = 5

    assert of_array.data == of_tensor.data == [5, 0, 0]
    assert np.shares_memory(of_array.to_numpy(), array)
    assert of_tensor.to_torch().data_ptr() == tensor.data_ptr()


@given(hnp.arrays(st.sampled_from(["float32", "int64"]), hnp.array_shapes(min_side=0)))
def test_every_bit_round_trips(array: Any) -> None:
    tensor = TensorData.from_numpy(array)

    assert tensor.to_numpy().tobytes() == array.tobytes()
    assert tensor.to_torch().numpy().tobytes() == array.tobytes()
    assert TensorData(tensor.data, tensor.dtype, array.shape) == tensor or np.isnan(array).any()
    assert pickle.loads(pickle.dumps(tensor)) == tensor


def test_a_sparse_tensor_converts_to_dense() -> None:
    assert MATRIX.is_sparse
    assert MATRIX.tolist() == DENSE_ROWS
    assert MATRIX.to_numpy().tolist() == DENSE_ROWS
    assert MATRIX.to_torch().tolist() == DENSE_ROWS
    assert MATRIX.tolist(pad_value=-1)[0] == [-1, -1, -1, 5]
    assert MATRIX.to_numpy(-1).tolist() == MATRIX.to_torch(-1).tolist() == MATRIX.tolist(-1)
    assert MATRIX.data == [5, 6, 7]
    assert MATRIX.sparse_crow_indices == [0, 1, 3]
    assert MATRIX.sparse_col_indices == [3, 0, 2]
    assert MATRIX.nbytes == 3 * 8 + 3 * 8 + 3 * 8


def test_a_matrix_is_sparse_if_that_takes_less_room() -> None:
    eye = torch.eye(8, dtype=torch.int64)  # 9 row starts and 2 × 8 cells are less than 64
    full = torch.ones(8, 8)

    sparse, dense = TensorData.from_torch_sparse(eye), TensorData.from_torch_sparse(full)

    assert sparse.is_sparse
    assert sparse.tolist() == eye.tolist()
    assert sparse.nbytes == 8 * (9 + 2 * 8)
    assert not dense.is_sparse
    assert dense.tolist() == full.tolist()


def test_the_choice_between_sparse_and_dense_matches_the_official_sdk() -> None:
    """Sparse when `rows + 1 + 2 × stored` is below the number of cells."""
    matrix = torch.zeros(1, 8)
    matrix[0, :3] = 1  # 2 + 6 = 8 cells: not below

    assert not TensorData.from_torch_sparse(matrix).is_sparse
    matrix[0, 2] = 0
    assert TensorData.from_torch_sparse(matrix).is_sparse


def test_cells_of_another_pad_value_are_left_out() -> None:
    matrix = torch.full((4, 8), -100)
    matrix[1, 2] = 7

    sparse = TensorData.from_torch_sparse(matrix, pad_value=-100)

    assert sparse.data == [7]
    assert sparse.to_torch(pad_value=-100).equal(matrix)


@given(
    hnp.arrays(
        "int64",
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9),
        elements=st.sampled_from([0, 0, 0, 1, -5]),
    )
)
def test_a_matrix_round_trips_sparse_or_dense(matrix: Any) -> None:
    tensor = TensorData.from_torch_sparse(torch.from_numpy(matrix))

    assert tensor.tolist() == matrix.tolist()
    assert tensor.to_numpy().tolist() == matrix.tolist()
    assert copy.deepcopy(tensor) == tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_crow_indices": None}, "both"),
        ({"sparse_col_indices": None}, "both"),
        ({"shape": None}, "two dimensions"),
        ({"shape": [8]}, "two dimensions"),
        ({"shape": [3, 4]}, "4 integers"),
        ({"sparse_crow_indices": [0, 2, 1]}, "from 0 to 3"),
        ({"sparse_crow_indices": [1, 2, 3]}, "from 0 to 3"),
        ({"sparse_crow_indices": [0, 5, 3]}, "not decrease"),
        ({"sparse_crow_indices": [0, -1, 3]}, "not decrease"),
        ({"sparse_crow_indices": []}, "from 0 to 3"),
        ({"sparse_col_indices": [0, 1]}, "has 2 values"),
        ({"sparse_col_indices": [0, 1, 4]}, "between 0 and 3"),
        ({"sparse_col_indices": [0, -1, 2]}, "between 0 and 3"),
        ({"sparse_col_indices": [0, 1.5, 2]}, "not a valid int64"),
    ],
)
def test_a_sparse_tensor_is_checked(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {
        "data": [5, 6, 7],
        "dtype": "int64",
        "shape": [2, 4],
        "sparse_crow_indices": [0, 1, 3],
        "sparse_col_indices": [3, 0, 2],
    }

    with pytest.raises(ValidationError, match=message):
        TensorData(**{**parts, **change})


@pytest.mark.parametrize(
    ("shape", "nested"),
    [
        ([], 7),
        ([1], [7]),
        ([1, 1, 1], [[[7]]]),
        ([0], []),
        ([2, 0], [[], []]),
        ([0, 2], []),
        ([2, 0, 3], [[], []]),
    ],
)
def test_nested_lists_have_the_shape_of_the_tensor(shape: list[int], nested: Any) -> None:
    count = math.prod(shape)

    tensor = TensorData([7] * count, "int64", shape)

    assert tensor.tolist() == nested
    assert tensor.to_numpy().tolist() == nested


def test_tensors_are_equal_when_every_bit_is() -> None:
    tensor = TensorData([1.0, math.nan], "float32", [2])

    assert tensor == TensorData(np.array([1, math.nan], dtype="float32"), "float32", [2])
    assert tensor != TensorData([1.0, math.nan], "float32", [2, 1])
    assert TensorData([0.0], "float32") != TensorData([-0.0], "float32")
    assert TensorData([1], "int64") != TensorData([1], "float32")
    assert TensorData(DENSE_ROWS, "int64") != MATRIX
    assert copy.copy(MATRIX) == MATRIX
    assert tensor != [1.0, math.nan]
    with pytest.raises(TypeError, match="unhashable"):
        hash(tensor)


def test_a_tensor_is_immutable() -> None:
    with pytest.raises(AttributeError, match="create a new TensorData"):
        MATRIX.dtype = "float32"
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del MATRIX.shape
    with pytest.raises(AttributeError):
        MATRIX.note = "x"


def test_a_repr_stays_short() -> None:
    tensor = TensorData.from_numpy(np.zeros((1000, 1000)))

    assert len(repr(tensor)) < 200
    assert "992 more" in repr(tensor)
    assert "3 cells stored" in repr(MATRIX)


def test_a_tensor_is_dumped_as_plain_data() -> None:
    assert to_plain(TensorData([1, 2], "int64")) == {"data": [1, 2], "dtype": "int64"}
    assert to_plain(MATRIX) == {
        "data": [5, 6, 7],
        "dtype": "int64",
        "shape": [2, 4],
        "sparse_crow_indices": [0, 1, 3],
        "sparse_col_indices": [3, 0, 2],
    }


def test_values_of_a_datum_become_tensors() -> None:
    tensor = TensorData([1], "int64")

    assert tensor_from("x", tensor, None) is tensor
    assert tensor_from("x", np.array([1.5]), "int64").dtype == "float32"
    assert tensor_from("x", np.float32(1.5), None).shape == []
    assert tensor_from("x", [[1, 2]], "float32").shape == [1, 2]
    assert tensor_from("weights", torch.eye(10), None).is_sparse
    assert not tensor_from("advantages", torch.eye(10), None).is_sparse
    assert not tensor_from("weights", torch.ones(10), None).is_sparse


def test_invalid_tensors_raise_validation_errors_that_are_value_errors() -> None:
    with pytest.raises(TinkerError) as caught:
        TensorData([1, 2], "int64", [3])

    assert isinstance(caught.value, ValueError)
