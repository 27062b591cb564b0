"""What a pass gives for each datum, in protobuf: columns of arrays over all datums of one layout.

Part of `proto_format.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import (
    Memory,
    Numbers,
)
from tinsmith.types.inputs import (
    LossFnOutput,
)
from tinsmith.types.tensors import TensorData, TensorDtype
from tinsmith.wire.generated import tags
from tinsmith.wire.proto_tensors import (
    DTYPE_CODES,
    VALUE_MESSAGE,
    checked_shape,
    numbers_of,
    read_entry,
    widened,
)
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    put_bytes,
    put_int,
    put_map_entry,
    put_message,
    put_packed_ints,
    put_pieces,
    signed,
)


def record_layout(output: LossFnOutput) -> tuple[Any, ...]:
    """What outputs must share to be written as one record."""
    return tuple(
        (name, tensor.dtype, tuple((tensor.shape or [0])[1:])) for name, tensor in output.items()
    )


def write_record(out: Parts, outputs: list[LossFnOutput]) -> int:
    """Outputs of one layout, as columns; returns their size."""
    size = 0
    for name in outputs[0]:
        column = [output[name] for output in outputs]
        if any(tensor.is_sparse for tensor in column):
            raise ValidationError(f"the output {name!r} is sparse; results are dense")
        size += put_map_entry(out, tags.ARRAY_RECORD__FIELDS, name, _write_column_value, column)
    return size + put_int(out, tags.ARRAY_RECORD__NUM_DATUMS, len(outputs))


def _write_column_value(out: Parts, column: list[TensorData]) -> int:
    return put_message(out, VALUE_MESSAGE, _write_column, column)


def _write_column(out: Parts, column: list[TensorData]) -> int:
    memories = [tensor.numbers.memory for tensor in column]
    offsets = [0]
    for memory in memories:
        offsets.append(offsets[-1] + len(memory))
    size = put_pieces(out, tags.BATCHED_TENSOR__DATA, memories)
    packed = struct.pack(f"<{len(offsets)}q", *offsets)
    size += put_bytes(out, tags.BATCHED_TENSOR__OFFSETS, packed)
    size += put_int(out, tags.BATCHED_TENSOR__DTYPE, DTYPE_CODES[column[0].dtype])
    trailing = (column[0].shape or [0])[1:]
    return size + put_packed_ints(out, tags.BATCHED_TENSOR__TRAILING_SHAPE, trailing)


def read_record(reader: Reader, start: int, stop: int) -> list[LossFnOutput]:
    """The outputs between two places of a body, one dict for each datum."""
    columns: dict[str, list[TensorData]] = {}
    count = 0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.ARRAY_RECORD__FIELDS:
            name, column = read_entry(reader, at, end, _read_column, [])
            columns[name] = column
        elif tag == tags.ARRAY_RECORD__NUM_DATUMS:
            count = signed(at)
    count = count or len(next(iter(columns.values()), ()))
    if count < 0:
        raise DecodeError(f"a record says that it holds {count} datums")
    for name, column in columns.items():
        if len(column) != count:
            raise DecodeError(
                f"the output {name!r:.80} has {len(column)} arrays for {count} datums"
            )
    reader.take_items(count)
    outputs: list[LossFnOutput] = [{} for _ in range(count)]
    for name, column in columns.items():
        for output, tensor in zip(outputs, column, strict=True):
            output[name] = tensor
    return outputs


def _read_column(reader: Reader, start: int, stop: int) -> list[TensorData]:
    data: Memory = b""
    offset_memory: Memory = b""
    code = tags.DTYPE_UNSPECIFIED
    trailing: list[int] = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.BATCHED_TENSOR__DATA:
            data = reader.memory(at, end)
        elif tag == tags.BATCHED_TENSOR__OFFSETS:
            offset_memory = reader.memory(at, end)
        elif tag == tags.BATCHED_TENSOR__DTYPE:
            code = at
        elif tag == tags.BATCHED_TENSOR__TRAILING_SHAPE:
            trailing = checked_shape(trailing + reader.packed_ints(at, min(end, at + 10 * 33)))
        elif tag == tags.BATCHED_TENSOR__TRAILING_SHAPE_UNPACKED:
            trailing = checked_shape([*trailing, signed(at)])
    numbers, dtype = widened(reader, data, code)
    offsets = numbers_of(offset_memory, "int64", "offsets").view()
    reader.take_items(max(0, len(offsets) - 1))
    # Offsets count the bytes that came; int32 and bfloat16 are wider by now.
    width = len(data) // len(numbers) if len(numbers) else 1
    return list(_slices(numbers, offsets, width, dtype, trailing, len(data)))


def _slices(
    numbers: Numbers,
    offsets: memoryview[int],
    width: int,
    dtype: TensorDtype,
    trailing: list[int],
    data_bytes: int,
) -> Iterator[TensorData]:
    row = math.prod(trailing)
    for index in range(len(offsets) - 1):
        start, stop = offsets[index], offsets[index + 1]
        if not 0 <= start <= stop <= data_bytes or start % width or stop % width:
            raise DecodeError(
                f"array {index} is said to lie in bytes {start}…{stop} of {data_bytes}"
            )
        count = (stop - start) // width
        if row and count % row:
            raise DecodeError(f"{count} numbers do not fill rows of shape {trailing}")
        part = numbers.slice(start // width, stop // width)
        shape = [count // row if row else 0, *trailing]
        if not row and count:
            raise DecodeError(f"{count} numbers do not fill rows of shape {trailing}")
        yield TensorData.of_numbers(part, dtype, shape)
