"""The protobuf bodies of training: its requests and its results. `proto_samples.py` has samples'.

Each `encode_…` gives the body in parts whose arrays are the caller's own memory; each `decode_…`
gives a value whose arrays are views of the body. Absent and unknown fields are as the schema says;
a field that should come once and comes again replaces the first.

`proto/tinsmith.proto` is the schema, `generated/tags.py` its numbers.
"""

from __future__ import annotations

from itertools import groupby

from tinsmith.errors import ValidationError
from tinsmith.types.buffers import (
    Memory,
)
from tinsmith.types.inputs import (
    Datum,
    LossFnOutput,
)
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinsmith.wire.generated import tags
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.proto_data import read_datum, write_datum
from tinsmith.wire.proto_outputs import read_record, record_layout, write_record
from tinsmith.wire.proto_tensors import (
    KEY,
    VALUE_DOUBLE,
    VALUE_MESSAGE,
    read_entry,
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
    put_text,
    signed32,
)

_LOOKED_THROUGH = 16 * 1024
"""As many messages as a request may have datums, and a few times more."""


def encode_forward_backward_request(request: ForwardBackwardRequest) -> Parts:
    """The body of `forward_backward`, for both directions."""
    out: Parts = []
    given = request.forward_backward_input
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__MODEL_ID, request.model_id)
    put_int32(out, tags.FORWARD_BACKWARD_REQUEST__SEQ_ID, request.seq_id or 0, "seq_id")
    for datum in given.data:
        put_message(out, tags.FORWARD_BACKWARD_REQUEST__DATA, write_datum, datum)
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__LOSS_FN, given.loss_fn)
    config = given.loss_fn_config or {}
    for name, value in config.items():
        if not isinstance(value, str):  # servers before SDK 0.27 read numbers from here
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
    """Read the body of `forward_backward`.

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
    config = values or numbers or None  # the newer map knows all that the older one does
    given = ForwardBackwardInput(data, loss_fn, config)  # type: ignore[arg-type]  # any name
    return ForwardBackwardRequest(given, model_id, seq_id, forward_only=forward_only)


def read_number(body: Memory) -> tuple[str, int]:
    """The model and the number of a `forward_backward`, whatever else its body holds.

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
    """The result of `forward_backward`.

    Raises:
        ValidationError: The outputs do not all have the same names, or one is sparse.
    """
    out: Parts = []
    put_text(out, tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUT_TYPE, output.loss_fn_output_type)
    # A record holds neighbours whose arrays differ in their first dimension alone.
    for _, run in groupby(output.loss_fn_outputs, key=record_layout):
        place = tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUTS
        put_message(out, place, write_record, list(run))
    if len({frozenset(datum) for datum in output.loss_fn_outputs}) > 1:
        raise ValidationError("each of a pass's loss_fn_outputs must have the same names")
    for name, value in output.metrics.items():
        place = tags.FORWARD_BACKWARD_OUTPUT__METRICS
        put_map_entry(out, place, name, _write_double_value, float(value))
    return merged(out)


def decode_forward_backward_output(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS
) -> ForwardBackwardOutput:
    """Read the result of `forward_backward`.

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
    # The server may name the class with its module before a colon.
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
            raise ValidationError(f"{value!r:.80} is no text that can be sent") from exc
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
