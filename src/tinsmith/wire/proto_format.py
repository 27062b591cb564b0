"""The protobuf bodies of training requests and results; `proto_samples.py` has those of samples.

`encode_…` functions return a list of buffers that share the caller's arrays; `decode_…` functions
return values whose arrays are views of the body. Missing and unknown fields follow the schema; the
last occurrence of a repeated scalar field wins.

`proto/tinsmith.proto` is the schema, and `generated/tags.py` has its numbers.

Outputs per datum are columns of arrays, for all datums of the same layout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import (
    Memory,
    Numbers,
)
from tinsmith.types.inputs import (
    Datum,
    LossFnOutput,
)
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.tensors import TensorData, TensorDtype
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.generated import tags
from tinsmith.wire.proto_data import (
    DTYPE_CODES,
    KEY,
    VALUE_DOUBLE,
    VALUE_MESSAGE,
    checked_shape,
    numbers_of,
    read_datum,
    read_entry,
    widened,
    write_datum,
)
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    merged,
    put_bytes,
    put_double,
    put_int,
    put_int32,
    put_map_entry,
    put_message,
    put_packed_ints,
    put_pieces,
    put_text,
    signed,
    signed32,
)


def record_layout(output: LossFnOutput) -> tuple[Any, ...]:
    """The key by which outputs are grouped into one record."""
    return tuple(
        (name, tensor.dtype, tuple((tensor.shape or [0])[1:])) for name, tensor in output.items()
    )


def write_record(out: Parts, outputs: list[LossFnOutput]) -> int:
    """Encode outputs of one layout as columns, and return their size."""
    size = 0
    for name in outputs[0]:
        column = [output[name] for output in outputs]
        if any(tensor.is_sparse for tensor in column):
            raise ValidationError(f"the output {name!r} is sparse: results must be dense")
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
    """Decode the outputs in a range of the body: one dict per datum."""
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
        raise DecodeError(f"invalid number of datums in a record: {count}")
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
    # Offsets are in encoded bytes; int32 and bfloat16 were widened.
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
                f"array {index} has the invalid range {start} to {stop} of {data_bytes} bytes"
            )
        count = (stop - start) // width
        if count % row if row else count:
            raise DecodeError(f"{count} numbers do not fill rows of shape {trailing}")
        part = numbers.slice(start // width, stop // width)
        shape = [count // row if row else 0, *trailing]
        yield TensorData.of_numbers(part, dtype, shape)


_LOOKED_THROUGH = 16 * 1024
"""Several times as many messages as a request may have datums."""


def encode_forward_backward_request(request: ForwardBackwardRequest) -> Parts:
    """Encode a request of `forward` or `forward_backward`."""
    out: Parts = []
    given = request.forward_backward_input
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__MODEL_ID, request.model_id)
    put_int32(out, tags.FORWARD_BACKWARD_REQUEST__SEQ_ID, request.seq_id or 0, "seq_id")
    for datum in given.data:
        put_message(out, tags.FORWARD_BACKWARD_REQUEST__DATA, write_datum, datum)
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__LOSS_FN, given.loss_fn)
    config = given.loss_fn_config or {}
    for name, value in config.items():
        if not isinstance(value, str):  # for servers before SDK 0.27
            place = tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG
            put_map_entry(out, place, name, _write_double_value, float(value))
    put_int(out, tags.FORWARD_BACKWARD_REQUEST__FORWARD_ONLY, int(request.forward_only))
    for name, value in config.items():
        place = tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG_V2
        put_map_entry(out, place, name, _write_config_value, value)
    return merged(out)


def decode_forward_backward_request(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS
) -> ForwardBackwardRequest:
    """Decode a request of `forward` or `forward_backward`.

    Raises:
        DecodeError: It is not such a message.
    """
    reader = Reader(body, limits)
    model_id, seq_id, loss_fn, forward_only = "", 0, "", False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_REQUEST__DATA:
            data.append(read_datum(reader, start, stop))
        elif tag == tags.FORWARD_BACKWARD_REQUEST__MODEL_ID:
            model_id = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__SEQ_ID:
            seq_id = signed32(start)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN:
            loss_fn = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__FORWARD_ONLY:
            forward_only = bool(start)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG:
            name, number = _read_double_entry(reader, start, stop)
            numbers[name] = number
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG_V2:
            name, value = read_entry(reader, start, stop, _read_config_value, 0.0)
            values[name] = value
    config = values or numbers or None  # the newer map has everything that the older one has
    given = ForwardBackwardInput(data, loss_fn, config)  # type: ignore[arg-type]  # any name
    return ForwardBackwardRequest(given, model_id, seq_id, forward_only=forward_only)


def read_number(body: Memory) -> tuple[str, int]:
    """The model and the sequence number of a request, without decoding the rest.

    The body was refused, and may be as large as one can be: this stops as soon as it has both.
    Clients write them first.

    Raises:
        DecodeError: They cannot be found, or not among the first fields.
    """
    reader = Reader(body, DecodeLimits(memory_bytes=len(body), messages=_LOOKED_THROUGH))
    model_id, seq_id = "", 0
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_REQUEST__MODEL_ID:
            model_id = str(reader.memory(start, stop), "utf-8", "replace")
        elif tag == tags.FORWARD_BACKWARD_REQUEST__SEQ_ID:
            seq_id = signed32(start)
        if model_id and seq_id:
            break
    return model_id, seq_id


def encode_forward_backward_output(output: ForwardBackwardOutput) -> Parts:
    """Encode the result of `forward_backward`.

    Raises:
        ValidationError: The outputs do not all have the same names, or one is sparse.
    """
    out: Parts = []
    put_text(out, tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUT_TYPE, output.loss_fn_output_type)
    # A record has adjacent outputs whose arrays differ only in their first dimension.
    for _, run in groupby(output.loss_fn_outputs, key=record_layout):
        place = tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUTS
        put_message(out, place, write_record, list(run))
    if len({frozenset(datum) for datum in output.loss_fn_outputs}) > 1:
        raise ValidationError("all loss_fn_outputs must have the same names")
    for name, value in output.metrics.items():
        place = tags.FORWARD_BACKWARD_OUTPUT__METRICS
        put_map_entry(out, place, name, _write_double_value, float(value))
    return merged(out)


def decode_forward_backward_output(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS
) -> ForwardBackwardOutput:
    """Decode the result of `forward_backward`.

    Raises:
        DecodeError: It is not such a message.
    """
    reader = Reader(body, limits)
    output_type = ""
    outputs: list[LossFnOutput] = []
    has_records = False
    metrics: dict[str, float] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUTS:
            outputs += read_record(reader, start, stop)
            has_records = True
        elif tag == tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUT_TYPE:
            output_type = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_OUTPUT__METRICS:
            name, value = _read_double_entry(reader, start, stop)
            metrics[name] = value
    # The class may be preceded by its module and a colon.
    name = output_type.rsplit(":", 1)[-1] if has_records else output_type or "ArrayRecord"
    return ForwardBackwardOutput(name, outputs, metrics)


def _write_double_value(out: Parts, number: float) -> int:
    return put_double(out, VALUE_DOUBLE, number)


def _write_config_value(out: Parts, value: float | str) -> int:
    return put_message(out, VALUE_MESSAGE, _write_config, value)


def _write_config(out: Parts, value: float | str) -> int:
    if isinstance(value, str):
        try:
            return put_bytes(out, tags.LOSS_CONFIG_VALUE__TEXT, value.encode())
        except UnicodeEncodeError as exc:
            raise ValidationError(f"{value!r:.80} cannot be encoded as UTF-8") from exc
    return put_double(out, tags.LOSS_CONFIG_VALUE__NUMBER, float(value))


def _read_config_value(reader: Reader, start: int, stop: int) -> float | str:
    value: float | str = 0.0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.LOSS_CONFIG_VALUE__NUMBER:
            value = reader.double(at)
        elif tag == tags.LOSS_CONFIG_VALUE__TEXT:
            value = reader.text(at, end)
    return value


def _read_double_entry(reader: Reader, start: int, stop: int) -> tuple[str, float]:
    key, value = "", 0.0
    for tag, at, end in reader.message(start, stop):
        if tag == KEY:
            key = reader.text(at, end)
        elif tag == VALUE_DOUBLE:
            value = reader.double(at)
    return key, value
