"""What users put into a datum becomes the same tensor as with the official SDK."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as official

from tests.contract.strategies import (
    as_ours,
    bits,
    contract,
    finite_floats,
    int64s,
    sparse_tensors,
)
from tinsmith import types as ours
from tinsmith.errors import ValidationError

KEYS = ["target_tokens", "weights", "advantages", "logprobs", "sequence_ratio_mask"]
FLOAT32S = st.floats(width=32)


def both(key: str, value: Any) -> tuple[Any, Any]:
    """The tensor that each SDK makes of a datum's input: the official as ours, and ours."""
    theirs = official.Datum(official.ModelInput.empty(), {key: value}).loss_fn_inputs[key]
    mine = ours.Datum(ours.ModelInput.empty(), {key: value}).loss_fn_inputs[key]
    return as_ours(theirs), mine


@contract
@given(st.lists(int64s, max_size=5) | st.lists(st.booleans(), max_size=3))
def test_lists_of_integers_become_int64(values: list[int]) -> None:
    theirs, mine = both("target_tokens", values)

    assert mine == theirs


@contract
@given(
    st.sampled_from(KEYS[1:]),
    st.lists(st.lists(FLOAT32S, min_size=2, max_size=2), max_size=4) | st.lists(FLOAT32S),
)
def test_lists_of_floats_become_float32(key: str, values: list[Any]) -> None:
    theirs, mine = both(key, values)

    assert mine == theirs


@contract
@given(finite_floats)
def test_doubles_are_rounded_to_float32_like_in_the_official_sdk(value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where a double becomes infinite
        theirs, mine = both("weights", [value])

    assert mine == theirs


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    cells = st.sampled_from([0, 0, 0, 0, -1, 7])
    flat = draw(st.lists(cells, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from([torch.int64, torch.float32]))
    return torch.tensor(flat, dtype=dtype).reshape(rows, columns)


@settings(contract, max_examples=100)
@given(matrices(), st.sampled_from([0, -1, 7]))
def test_a_matrix_is_made_sparse_exactly_when_the_official_sdk_does(
    matrix: torch.Tensor, pad_value: int
) -> None:
    theirs = official.TensorData.from_torch_sparse(matrix, pad_value)
    mine = ours.TensorData.from_torch_sparse(matrix, pad_value)

    assert mine == as_ours(theirs)
    assert mine.tolist(pad_value) == matrix.tolist()
    for key in ("target_tokens", "weights", "advantages"):
        made_by_official, made_by_us = both(key, matrix)
        assert made_by_us == made_by_official


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_tensors_that_are_not_matrices_are_never_made_sparse(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)

    theirs = official.TensorData.from_torch_sparse(tensor)

    assert ours.TensorData.from_torch_sparse(tensor) == as_ours(theirs)


@contract
@given(sparse_tensors(), st.sampled_from([0, -1, 5]))
def test_sparse_tensors_are_densified_like_in_the_official_sdk(
    tensor: official.TensorData, pad_value: int
) -> None:
    """The official way adds and subtracts the filling, so only exact numbers can be compared."""
    whole = official.TensorData(
        data=np.arange(1, tensor._numpy.size + 1).astype(tensor.dtype),
        dtype=tensor.dtype,
        shape=tensor.shape,
        sparse_crow_indices=tensor.sparse_crow_indices,
        sparse_col_indices=tensor.sparse_col_indices,
    )

    mine = as_ours(whole)

    assert mine.to_numpy(pad_value).tobytes() == whole.to_numpy(pad_value).tobytes()
    assert mine.tolist(pad_value) == whole.tolist(pad_value)
    assert torch.equal(mine.to_torch(pad_value), whole.to_torch(pad_value))


@contract
@given(bits("float32", 6))
def test_dense_tensors_round_trip_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    theirs = official.TensorData(data=values, dtype="float32", shape=[2, 3])
    mine = ours.TensorData(values, "float32", [2, 3])

    assert mine.to_numpy().tobytes() == theirs.to_numpy().tobytes()
    assert mine.to_numpy().shape == theirs.to_numpy().shape
    assert repr(mine.tolist()) == repr(theirs.tolist())
    assert repr(mine.data) == repr(theirs.data)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("weights", [[1.0], [1.0, 2.0]], ValueError),
        ("other", [1.0], KeyError),
        ("weights", {"a": 1}, TypeError),
        ("weights", np.array(["x"]), ValueError),
        ("weights", np.array([True]), ValueError),
        ("weights", torch.ones(1, requires_grad=True), RuntimeError),
    ],
)
def test_tensors_that_the_official_sdk_rejects_raise_the_same_error(
    key: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        official.Datum(official.ModelInput.empty(), {key: value})
    with pytest.raises(error):
        ours.Datum(ours.ModelInput.empty(), {key: value})


def test_targets_that_are_not_integers_are_rejected() -> None:
    """The official SDK cuts 1.5 down to 1 in silence; a target that is no token is a mistake."""
    theirs = official.Datum(official.ModelInput.empty(), {"target_tokens": [1.5]})  # type: ignore[dict-item]  # lists are converted

    assert theirs.loss_fn_inputs["target_tokens"].tolist() == [1]
    with pytest.raises(ValidationError, match=r"target_tokens\[0\] is 1.5"):
        ours.Datum(ours.ModelInput.empty(), {"target_tokens": [1.5]})
