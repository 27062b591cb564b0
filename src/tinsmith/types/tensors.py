"""Tensors as the API knows them: int64 or float32, dense or compressed by rows.

A tensor's numbers are held once, as `Numbers`, and go to the wire from there. numpy and torch are
touched only when the caller passes or asks for one of their arrays.
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
MOST_DIMENSIONS = 32
_DTYPE_OF_NUMPY_KIND: dict[str, TensorDtype] = {"f": "float32", "i": "int64"}


class TensorData(Frozen):
    """Numbers of one dtype with a shape, dense or in compressed sparse row (CSR) form.

    A sparse tensor lists its stored values row by row: `sparse_crow_indices[i]` is where row `i`
    begins in `data`, and `sparse_col_indices` gives each value's column; `shape` is that of the
    whole matrix.

    An array that is already of the right dtype is shared, not copied. Tensors are equal when
    dtype, shape and every bit of their numbers are.
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
            shape = given_shape  # a nested list or an array says its own shape
        set_once(self, "dtype", dtype)
        set_once(self, "shape", None if shape is None else _checked_shape(shape))
        set_once(self, "_numbers", numbers)
        set_once(self, "_row_starts", _indices(sparse_crow_indices, "sparse_crow_indices"))
        set_once(self, "_columns", _indices(sparse_col_indices, "sparse_col_indices"))
        self._check()

    @classmethod
    def of_numbers(cls, numbers: Numbers, dtype: TensorDtype, shape: list[int] | None) -> Self:
        """A dense tensor of numbers known to be right in kind and count; unchecked."""
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
                f"shape {self.shape} holds {math.prod(self.shape)} numbers, data has "
                f"{len(self._numbers)}"
            )

    def _check_sparse(self) -> None:
        if self._row_starts is None or self._columns is None:
            raise ValidationError(
                "a sparse tensor needs both sparse_crow_indices and sparse_col_indices"
            )
        if self.shape is None or len(self.shape) != 2:
            raise ValidationError(f"a sparse tensor needs a shape of two sizes, not {self.shape}")
        row_count, column_count = self.shape
        starts, columns = self._row_starts.view(), self._columns.view()
        value_count = len(self._numbers)
        if len(starts) != row_count + 1 or starts[0] != 0 or starts[-1] != value_count:
            raise ValidationError(
                f"sparse_crow_indices must be {row_count + 1} numbers from 0 to {value_count}"
            )
        if any(starts[row] > starts[row + 1] for row in range(row_count)):
            raise ValidationError("sparse_crow_indices must not fall")
        if len(columns) != value_count:
            raise ValidationError(
                f"sparse_col_indices has {len(columns)} numbers, data has {value_count}"
            )
        if value_count and not (min(columns) >= 0 and max(columns) < column_count):
            raise ValidationError(f"sparse_col_indices must lie in 0…{column_count - 1}")

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> Self:
        """Hold a numpy array of floats as float32, or of signed integers as int64.

        Memory is shared where the dtype is already the right one.
        """
        dtype = _DTYPE_OF_NUMPY_KIND.get(array.dtype.kind)
        if dtype is None:
            raise ValidationError(
                f"a numpy array of {array.dtype} is neither float nor signed integer",
                remedy="convert it with .astype('int64') or .astype('float32')",
            )
        return cls._whole(array, dtype, "data")

    @classmethod
    def _whole(cls, values: Any, dtype: TensorDtype, what: str) -> Self:
        """A dense tensor of the shape that the values have by themselves."""
        numbers, shape = pack(values, dtype, what)
        if len(shape) > MOST_DIMENSIONS:
            raise ValidationError(f"{what} has more than {MOST_DIMENSIONS} dimensions")
        return cls.of_numbers(numbers, dtype, shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Hold a torch tensor; as `from_numpy`, with bfloat16 widened to float32.

        Raises:
            RuntimeError: The tensor requires grad.
        """
        return cls.from_numpy(torch_to_numpy(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Hold a matrix without the cells that equal `pad_value`, if that takes less room.

        Tensors of other ranks are held whole.
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
        """The numbers as a new flat list; of a sparse tensor, the stored values."""
        return self._numbers.tolist()

    @property
    def numbers(self) -> Numbers:
        """The numbers in memory; of a sparse tensor, the stored values."""
        return self._numbers

    @property
    def row_starts(self) -> Numbers | None:
        """Where each row begins among the stored values, in memory; None for a dense tensor."""
        return self._row_starts

    @property
    def columns(self) -> Numbers | None:
        """The column of each stored value, in memory; None for a dense tensor."""
        return self._columns

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """Where each row begins among the stored values; None for a dense tensor."""
        return None if self._row_starts is None else self._row_starts.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The column of each stored value; None for a dense tensor."""
        return None if self._columns is None else self._columns.tolist()

    @property
    def is_sparse(self) -> bool:
        """Whether only some of the cells are stored."""
        return self._row_starts is not None

    @property
    def nbytes(self) -> int:
        """What the numbers take in memory and on the wire, indices included."""
        parts = (self._numbers, self._row_starts, self._columns)
        return sum(len(part.memory) for part in parts if part is not None)

    def to_numpy(self, pad_value: int = 0) -> np.ndarray[Any, Any]:
        """A writable numpy array; shares memory where the tensor was made from writable memory.

        Args:
            pad_value: What the cells that a sparse tensor does not store are filled with.
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
        """A torch tensor; memory and `pad_value` as in `to_numpy`."""
        try:
            import torch
        except ImportError as exc:
            raise ImportError(
                "to_torch returns a torch tensor and torch is not installed; "
                "install it with: pip install torch"
            ) from exc
        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Nested lists of the tensor's shape; `pad_value` as in `to_numpy`."""
        if self.is_sparse:
            return self._sparse_rows(pad_value)
        values = self._numbers.tolist()
        shape = self.shape or [len(values)]
        for level in range(len(shape) - 1, 0, -1):
            # Not by the number of values: rows may be empty and still be there.
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
    """The sizes, bounded in number and value: a product of many huge ones takes minutes to form."""
    try:
        sizes = [operator.index(size) for size in itertools.islice(shape, MOST_DIMENSIONS + 1)]
    except TypeError as exc:
        raise ValidationError(f"a tensor's shape must be whole numbers: {exc}") from exc
    if len(sizes) > MOST_DIMENSIONS:
        raise ValidationError(f"a tensor's shape has more than {MOST_DIMENSIONS} dimensions")
    if not all(0 <= size < 1 << 63 for size in sizes):
        raise ValidationError("a tensor's shape has a size that is negative or above 64 bits")
    return sizes


def _indices(values: Any, what: str) -> Numbers | None:
    return None if values is None else pack(values, "int64", what)[0]


def tensor_from(name: str, value: Any, dtype: TensorDtype | None) -> TensorData:
    """A tensor from whatever a caller put into a datum.

    Args:
        name: The loss input's name, for error messages.
        value: A tensor, a torch tensor, a numpy array or a (nested) list.
        dtype: The dtype for lists; None if this input takes no lists.
    """
    if isinstance(value, TensorData):
        return value
    if is_torch_tensor(value):
        if value.ndim == 2 and name in _SPARSE_WHERE_SMALLER:
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
            f"loss_fn_inputs[{name!r}] is a list and its dtype is not known; "
            "pass a numpy array, a torch tensor or TensorData"
        )
    return TensorData._whole(value, dtype, name)


_SPARSE_WHERE_SMALLER = frozenset({"target_tokens", "weights"})
