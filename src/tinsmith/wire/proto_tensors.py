"""Tensors in protobuf: dense and sparse, in the four dtypes of the wire, and entries of maps.

Part of `proto_format.py` and of `proto_samples.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import (
    ITEM_BYTES as NUMBER_BYTES,
)
from tinsmith.types.buffers import (
    Kind,
    Memory,
    Numbers,
    widen_bfloat16,
    widen_int32,
)
from tinsmith.types.tensors import MOST_DIMENSIONS, TensorData, TensorDtype
from tinsmith.wire.generated import tags
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    put_bytes,
    put_int,
    put_message,
    put_packed_ints,
    signed,
)

KEY, VALUE_MESSAGE, VALUE_DOUBLE = 0x0A, 0x12, 0x11
"""Tags of a map's entries: a key, and a value as field 2."""

DTYPE_CODES: dict[TensorDtype, int] = {
    "float32": tags.DTYPE_FLOAT32,
    "int64": tags.DTYPE_INT64,
}


def write_tensor(out: Parts, tensor: TensorData) -> int:
    """A tensor's fields; returns their size."""
    if tensor.row_starts is not None:
        size = put_message(out, tags.TENSOR__SPARSE_CSR, _write_csr, tensor)
    else:
        size = put_bytes(out, tags.TENSOR__DENSE, tensor.numbers.memory)
    tail = _dtype_and_shape(tensor.dtype, tuple(tensor.shape or ()))
    out.append(tail)
    return size + len(tail)


@functools.lru_cache(maxsize=1024)
def _dtype_and_shape(dtype: TensorDtype, shape: tuple[int, ...]) -> bytes:
    """What follows a tensor's numbers; the same for many tensors of a batch."""
    out: Parts = []
    put_int(out, tags.TENSOR__DTYPE, DTYPE_CODES[dtype])
    put_packed_ints(out, tags.TENSOR__SHAPE, list(shape))
    return b"".join(out)


def _write_csr(out: Parts, tensor: TensorData) -> int:
    assert tensor.row_starts is not None and tensor.columns is not None
    return (
        put_unless_empty(out, tags.SPARSE_CSR__VALUES, tensor.numbers.memory)
        + put_unless_empty(out, tags.SPARSE_CSR__CROW_INDICES, tensor.row_starts.memory)
        + put_unless_empty(out, tags.SPARSE_CSR__COL_INDICES, tensor.columns.memory)
    )


def read_tensor(reader: Reader, start: int, stop: int) -> TensorData:
    """The tensor between two places of a body."""
    dense: Memory | None = None
    csr: tuple[int, int] | None = None
    code = tags.DTYPE_UNSPECIFIED
    shape: list[int] = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.TENSOR__DENSE:
            dense, csr = reader.memory(at, end), None
        elif tag == tags.TENSOR__SPARSE_CSR:
            dense, csr = None, (at, end)
        elif tag == tags.TENSOR__DTYPE:
            code = at
        elif tag == tags.TENSOR__SHAPE:
            shape = checked_shape(shape + reader.packed_ints(at, min(end, at + 10 * 33)))
        elif tag == tags.TENSOR__SHAPE_UNPACKED:
            shape = checked_shape([*shape, signed(at)])
    if csr is not None:
        return _read_csr(reader, *csr, code, shape)
    numbers, dtype = widened(reader, b"" if dense is None else dense, code)
    if shape and math.prod(shape) != len(numbers):
        raise DecodeError(f"a tensor of shape {shape} came with {len(numbers)} numbers")
    return TensorData.of_numbers(numbers, dtype, shape or None)


def _read_csr(reader: Reader, start: int, stop: int, code: int, shape: list[int]) -> TensorData:
    stored = row_starts = columns = memoryview(b"")
    for tag, at, end in reader.message(start, stop):
        if tag == tags.SPARSE_CSR__VALUES:
            stored = reader.memory(at, end)
        elif tag == tags.SPARSE_CSR__CROW_INDICES:
            row_starts = reader.memory(at, end)
        elif tag == tags.SPARSE_CSR__COL_INDICES:
            columns = reader.memory(at, end)
    values, dtype = widened(reader, stored, code)
    try:
        return TensorData(
            values,
            dtype,
            shape,
            sparse_crow_indices=numbers_of(row_starts, "int64", "crow_indices"),
            sparse_col_indices=numbers_of(columns, "int64", "col_indices"),
        )
    except ValidationError as exc:
        raise DecodeError(str(exc)) from exc


def widened(reader: Reader, memory: Memory, code: int) -> tuple[Numbers, TensorDtype]:
    """The numbers in one of the two dtypes that tensors have, from the four on the wire."""
    if code == tags.DTYPE_FLOAT32:
        return numbers_of(memory, "float32", "a tensor"), "float32"
    if code == tags.DTYPE_INT64:
        return numbers_of(memory, "int64", "a tensor"), "int64"
    if code in (tags.DTYPE_INT32, tags.DTYPE_BFLOAT16):
        reader.take_bytes(2 * len(memory))  # these are no views of the body: they are widened
    if code == tags.DTYPE_INT32:
        return Numbers(
            widen_int32(numbers_of(memory, "int32", "a tensor").memory), "int64"
        ), "int64"
    if code == tags.DTYPE_BFLOAT16:
        if len(memory) % 2:
            raise DecodeError("a bfloat16 tensor has an odd number of bytes")
        return Numbers(widen_bfloat16(memory), "float32"), "float32"
    raise DecodeError(f"a tensor is of dtype {code}, which is not known")


def numbers_of(memory: Memory, kind: Kind, what: str) -> Numbers:
    """Memory as numbers; raises `DecodeError` if they are not whole."""
    if len(memory) % NUMBER_BYTES[kind]:
        raise DecodeError(f"{what} has {len(memory)} bytes, which are no whole {kind} numbers")
    return Numbers(memory, kind)


def checked_shape(shape: list[int]) -> list[int]:
    """The shape; raises `DecodeError` if no tensor has it."""
    if len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise DecodeError(f"a shape must have up to {MOST_DIMENSIONS} sizes, none negative")
    return shape


def read_entry(
    reader: Reader, start: int, stop: int, read: Callable[[Reader, int, int], Any], absent: Any
) -> tuple[str, Any]:
    """An entry of a map whose values are messages: its key, and what `read` makes of its value."""
    key, value = "", absent
    for tag, at, end in reader.message(start, stop):
        if tag == KEY:
            key = reader.text(at, end)
        elif tag == VALUE_MESSAGE:
            value = read(reader, at, end)
    return key, value


def put_unless_empty(out: Parts, tag: int, memory: Memory) -> int:
    """A field of bytes that is left out when there are none."""
    return put_bytes(out, tag, memory) if len(memory) else 0
