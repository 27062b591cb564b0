"""Tensors of the API: int64 or float32, dense or in compressed sparse row (CSR) format.

A tensor's values are stored once, as `Numbers`, and sent from there. numpy and torch are used only
if the caller passes or requests one of their arrays.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import (
    Numbers,
    is_torch_tensor,
    pack,
    shortened,
    torch_to_numpy,
)
from tinsmith.types.record import ArrayWriter, Frozen, set_once

if TYPE_CHECKING:
    import numpy as np
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]

_DTYPES: tuple[TensorDtype, ...] = ("int64", "float32")
MAX_DIMENSIONS = 32
_DTYPE_OF_NUMPY_KIND: dict[str, TensorDtype] = {"f": "float32", "i": "int64"}


class TensorData(Frozen):
    """A tensor, dense or in compressed sparse row (CSR) format.

    The data of a sparse tensor are its stored values, row by row: `sparse_crow_indices[i]` is the
    index in `data` where row `i` starts, and `sparse_col_indices` are the columns of the values.
    `shape` is that of the whole matrix.

    An array that already has the right dtype is shared, not copied. Tensors are equal if their
    dtypes, shapes and values are, bit for bit.
    """

    __slots__ = ("_columns", "_numbers", "_row_starts", "dtype", "shape")

    dtype: TensorDtype
    shape: list[int] | None
    _numbers: Numbers
    _row_starts: Numbers | None
    _columns: Numbers | None

    def __init__(
        self,
        data: Any = None,
        dtype: TensorDtype | None = None,
        shape: list[int] | tuple[int, ...] | None = None,
        sparse_crow_indices: Any = None,
        sparse_col_indices: Any = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"TensorData needs dtype 'int64' or 'float32', not {dtype!r}")
        numbers, given_shape = pack(() if data is None else data, dtype, "data")
        if shape is None and len(given_shape) != 1:
            shape = given_shape  # that of a nested list or an array
        set_once(self, "dtype", dtype)
        set_once(self, "shape", None if shape is None else _checked_shape(shape))
        set_once(self, "_numbers", numbers)
        set_once(self, "_row_starts", _indices(sparse_crow_indices, "sparse_crow_indices"))
        set_once(self, "_columns", _indices(sparse_col_indices, "sparse_col_indices"))
        self._check()

    @classmethod
    def of_numbers(cls, numbers: Numbers, dtype: TensorDtype, shape: list[int] | None) -> Self:
        """A dense tensor, without checking the dtype and the number of values."""
        tensor = object.__new__(cls)
        set_once(tensor, "dtype", dtype)
        set_once(tensor, "shape", shape)
        set_once(tensor, "_numbers", numbers)
        set_once(tensor, "_row_starts", None)
        set_once(tensor, "_columns", None)
        return tensor

    def _check(self) -> None:
        if self._row_starts is not None or self._columns is not None:
            self._check_sparse()
        elif self.shape is not None and math.prod(self.shape) != len(self._numbers):
            raise ValidationError(
                f"shape {self.shape} has {math.prod(self.shape)} values, but data has "
                f"{len(self._numbers)}"
            )

    def _check_sparse(self) -> None:
        if self._row_starts is None or self._columns is None:
            raise ValidationError(
                "a sparse tensor needs both sparse_crow_indices and sparse_col_indices"
            )
        if self.shape is None or len(self.shape) != 2:
            raise ValidationError(
                f"a sparse tensor needs a shape of two dimensions, not {self.shape}"
            )
        row_count, column_count = self.shape
        starts, columns = self._row_starts.view(), self._columns.view()
        value_count = len(self._numbers)
        if len(starts) != row_count + 1 or starts[0] != 0 or starts[-1] != value_count:
            raise ValidationError(
                f"sparse_crow_indices must be {row_count + 1} integers from 0 to {value_count}"
            )
        if any(starts[row] > starts[row + 1] for row in range(row_count)):
            raise ValidationError("sparse_crow_indices must not decrease")
        if len(columns) != value_count:
            raise ValidationError(
                f"sparse_col_indices has {len(columns)} values, but data has {value_count}"
            )
        if value_count and not (min(columns) >= 0 and max(columns) < column_count):
            raise ValidationError(f"sparse_col_indices must be between 0 and {column_count - 1}")

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> Self:
        """Convert a numpy array: floats to float32, signed integers to int64.

        Memory is shared if the array already has that dtype.
        """
        dtype = _DTYPE_OF_NUMPY_KIND.get(array.dtype.kind)
        if dtype is None:
            raise ValidationError(
                f"unsupported numpy dtype {array.dtype}: expected float or signed integer",
                remedy="convert it with .astype('int64') or .astype('float32')",
            )
        return cls._whole(array, dtype, "data")

    @classmethod
    def _whole(cls, values: Any, dtype: TensorDtype, what: str) -> Self:
        """A dense tensor with the shape of the values."""
        numbers, shape = pack(values, dtype, what)
        if len(shape) > MAX_DIMENSIONS:
            raise ValidationError(f"{what} has more than {MAX_DIMENSIONS} dimensions")
        return cls.of_numbers(numbers, dtype, shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Convert a torch tensor, as `from_numpy` does; bfloat16 becomes float32.

        Raises:
            RuntimeError: The tensor requires grad.
        """
        return cls.from_numpy(torch_to_numpy(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Convert a matrix, omitting cells equal to `pad_value` if that is smaller.

        Tensors of other ranks stay dense.
        """
        array = torch_to_numpy(tensor)
        dense = cls.from_numpy(array)
        if array.ndim != 2:
            return dense
        row_count, column_count = array.shape
        stored = array != pad_value
        columns = stored.nonzero()[1]
        if row_count + 1 + 2 * len(columns) >= row_count * column_count:
            return dense
        return cls(
            array[stored],
            dense.dtype,
            [row_count, column_count],
            sparse_crow_indices=[0, *stored.sum(axis=1).cumsum().tolist()],
            sparse_col_indices=columns,
        )

    @property
    def data(self) -> list[Any]:
        """The values as a new flat list; for a sparse tensor, the stored values."""
        return self._numbers.tolist()

    @property
    def numbers(self) -> Numbers:
        """The values as a buffer; for a sparse tensor, the stored values."""
        return self._numbers

    @property
    def row_starts(self) -> Numbers | None:
        """The start of each row in the stored values, as a buffer; None if dense."""
        return self._row_starts

    @property
    def columns(self) -> Numbers | None:
        """The column of each stored value, as a buffer; None if dense."""
        return self._columns

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """The start of each row in the stored values; None if dense."""
        return None if self._row_starts is None else self._row_starts.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The column of each stored value; None if dense."""
        return None if self._columns is None else self._columns.tolist()

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is in CSR format."""
        return self._row_starts is not None

    @property
    def nbytes(self) -> int:
        """The size of the values and indices in bytes."""
        parts = (self._numbers, self._row_starts, self._columns)
        return sum(len(part.memory) for part in parts if part is not None)

    def to_numpy(self, pad_value: int = 0) -> np.ndarray[Any, Any]:
        """A writable numpy array; it shares memory if the tensor was created from writable memory.

        Args:
            pad_value: The value of cells that a sparse tensor does not store.
        """
        values = self._numbers.numpy()
        if not self.is_sparse:
            return values if self.shape is None else values.reshape(self.shape)
        import numpy

        assert self._row_starts is not None and self._columns is not None and self.shape is not None
        dense = numpy.full(self.shape, pad_value, dtype=self.dtype)
        starts = self._row_starts.numpy()
        row_of_value = numpy.repeat(numpy.arange(len(starts) - 1), numpy.diff(starts))
        dense[row_of_value, self._columns.numpy()] = values
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """A torch tensor; `pad_value` and shared memory as for `to_numpy`."""
        try:
            import torch
        except ImportError as exc:
            raise ImportError(
                "to_torch requires torch, which is not installed; run `pip install torch`"
            ) from exc
        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """The values as nested lists; `pad_value` as for `to_numpy`."""
        if self.is_sparse:
            return self._sparse_rows(pad_value)
        values = self._numbers.tolist()
        shape = self.shape or [len(values)]
        for level in range(len(shape) - 1, 0, -1):
            # Not by the number of values, since rows may be empty.
            size, count = shape[level], math.prod(shape[:level])
            values = [values[i * size : (i + 1) * size] for i in range(count)]
        return values[0] if self.shape == [] else values

    def _sparse_rows(self, pad_value: int) -> list[list[Any]]:
        assert self._row_starts is not None and self._columns is not None and self.shape is not None
        values, starts, columns = (
            self._numbers.view(),
            self._row_starts.view(),
            self._columns.view(),
        )
        dense = [[pad_value] * self.shape[1] for _ in range(self.shape[0])]
        for row, cells in enumerate(dense):
            for index in range(starts[row], starts[row + 1]):
                cells[columns[index]] = values[index]
        return dense

    def _parts(self) -> tuple[Any, ...]:
        return self._numbers, self.dtype, self.shape, self._row_starts, self._columns

    def __repr__(self) -> str:
        sparse = f", {len(self._numbers)} cells stored" if self.is_sparse else ""
        return (
            f"TensorData(dtype={self.dtype!r}, shape={self.shape}{sparse}, "
            f"data={shortened(self._numbers)})"
        )

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        plain: dict[str, Any] = {"data": write_array(self._numbers), "dtype": self.dtype}
        if self.shape is not None:
            plain["shape"] = self.shape
        if self._row_starts is not None and self._columns is not None:
            plain["sparse_crow_indices"] = write_array(self._row_starts)
            plain["sparse_col_indices"] = write_array(self._columns)
        return plain

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        if not isinstance(plain, dict) or "data" not in plain:
            raise ValueError("Expected a tensor: an object with data, dtype and shape")
        return cls(
            plain["data"],
            plain.get("dtype"),
            plain.get("shape"),
            plain.get("sparse_crow_indices"),
            plain.get("sparse_col_indices"),
        )


def _checked_shape(shape: Iterable[Any]) -> list[int]:
    """The sizes, limited in number and value: multiplying many huge ones would take minutes."""
    try:
        sizes = [operator.index(size) for size in itertools.islice(shape, MAX_DIMENSIONS + 1)]
    except TypeError as exc:
        raise ValidationError(f"invalid shape: expected integers: {exc}") from exc
    if len(sizes) > MAX_DIMENSIONS:
        raise ValidationError(f"invalid shape: more than {MAX_DIMENSIONS} dimensions")
    if not all(0 <= size < 1 << 63 for size in sizes):
        raise ValidationError("invalid shape: a size is negative or exceeds 64 bits")
    return sizes


def _indices(values: Any, what: str) -> Numbers | None:
    return None if values is None else pack(values, "int64", what)[0]


def tensor_from(name: str, value: Any, dtype: TensorDtype | None) -> TensorData:
    """Convert an input of a loss function to a tensor.

    Args:
        name: The name of the input, for error messages.
        value: A `TensorData`, a torch tensor, a numpy array or a (nested) list.
        dtype: The dtype for lists; None if this input may not be a list.
    """
    if isinstance(value, TensorData):
        return value
    if is_torch_tensor(value):
        if value.ndim == 2 and name in _SPARSE_IF_SMALLER:
            return TensorData.from_torch_sparse(value)
        return TensorData.from_torch(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return TensorData.from_numpy(value)
    if not isinstance(value, list):
        raise TypeError(
            f"loss_fn_inputs[{name!r}] must be a list, a numpy array, a torch tensor or "
            f"TensorData, not {type(value).__name__}"
        )
    if dtype is None:
        raise KeyError(
            f"loss_fn_inputs[{name!r}] is a list, but its dtype is unknown; "
            "pass a numpy array, a torch tensor or TensorData"
        )
    return TensorData._whole(value, dtype, name)


_SPARSE_IF_SMALLER = frozenset({"target_tokens", "weights"})
