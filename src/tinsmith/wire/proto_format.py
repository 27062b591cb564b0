"""The three protobuf bodies of the API: training requests, training results, sampling results.

Each `encode_…` gives the body in parts whose arrays are the caller's own memory; each `decode_…`
gives a value whose arrays are views of the body. Absent and unknown fields are as the schema says;
a field that should come once and comes again replaces the first.

`proto/tinsmith.proto` is the schema, `generated/tags.py` its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, StopReason
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import TopkLogprobs
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinsmith.wire.generated import tags
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.proto_data import read_datum, write_datum
from tinsmith.wire.proto_outputs import read_record, record_layout, write_record
from tinsmith.wire.proto_tensors import (
    KEY,
    VALUE_DOUBLE,
    VALUE_MESSAGE,
    numbers_of,
    put_unless_empty,
    read_entry,
    read_tensor,
    write_tensor,
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

_STOP_REASONS: dict[int, StopReason] = {
    tags.STOP_REASON_STOP: "stop",
    tags.STOP_REASON_LENGTH: "length",
}
_NO_TOKENS = Numbers(b"", "int32")
_STOP_CODES = {name: code for code, name in _STOP_REASONS.items()}


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

    Raises:
        DecodeError: They cannot be found.
    """
    reader = Reader(body, DecodeLimits(memory_bytes=len(body)))
    model_id, seq_id = "", 0
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_REQUEST__MODEL_ID:
            model_id = str(reader.memory(start, stop), "utf-8", "replace")
        elif tag == tags.FORWARD_BACKWARD_REQUEST__SEQ_ID:
            seq_id = signed32(start)
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


def encode_sample_response(response: SampleResponse) -> Parts:
    """The result of `asample`; sequence ids are not part of it."""
    out: Parts = []
    for sequence in response.sequences:
        put_message(out, tags.SAMPLE_RESPONSE__SEQUENCES, _write_sequence, sequence)
    if response.prompt_logprob_numbers is not None:
        memory = response.prompt_logprob_numbers.memory
        put_bytes(out, tags.SAMPLE_RESPONSE__PROMPT_LOGPROBS, memory)
    if (topk := response.topk_prompt_logprobs_np) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__TOPK_PROMPT_LOGPROBS, _write_topk, topk)
    hits = response.prompt_cache_hit_tokens
    put_int32(out, tags.SAMPLE_RESPONSE__PROMPT_CACHE_HIT_TOKENS, hits, "prompt_cache_hit_tokens")
    if (target := response.target_prompt_logprobs) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__TARGET_PROMPT_LOGPROBS, write_tensor, target)
    if (drawn := response.prompt_alt_tokens) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__PROMPT_ALT_TOKENS, _write_alt_tokens, drawn)
    return merged(out)


def decode_sample_response(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS, sequence_ids: Sequence[str] = ()
) -> SampleResponse:
    """Read the result of `asample`.

    A body in writable memory is given away: the large arrays made of it share it and may be
    written to. Those of any other body are copied when they are asked for as numpy arrays.

    Args:
        body: What came.
        limits: How much memory it may take.
        sequence_ids: What the submission was answered with, in the sequences' order; without them
            the sequences have none.

    Raises:
        DecodeError: It is not such a message, or has more or fewer sequences than ids.
    """
    reader = Reader(body, limits)
    sequences: list[SampledSequence] = []
    ids = iter(sequence_ids)
    found: dict[str, Any] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.SAMPLE_RESPONSE__SEQUENCES:
            sequence_id = next(ids, "")
            sequences.append(_read_sequence(reader, start, stop, sequence_id))
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_LOGPROBS:
            found["prompt_logprobs_np"] = _floats(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__TOPK_PROMPT_LOGPROBS:
            found["topk_prompt_logprobs_np"] = _read_topk(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_CACHE_HIT_TOKENS:
            found["prompt_cache_hit_tokens"] = signed32(start)
        elif tag == tags.SAMPLE_RESPONSE__TARGET_PROMPT_LOGPROBS:
            found["target_prompt_logprobs"] = read_tensor(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_ALT_TOKENS:
            found["prompt_alt_tokens"] = _read_alt_tokens(reader, start, stop)
    if sequence_ids and len(sequence_ids) != len(sequences):
        raise DecodeError(f"{len(sequences)} sequences came with {len(sequence_ids)} sequence ids")
    return SampleResponse(sequences, **found)


# Sampling results


def _write_sequence(out: Parts, sequence: SampledSequence) -> int:
    size = put_int(out, tags.SAMPLED_SEQUENCE__STOP_REASON, _STOP_CODES[sequence.stop_reason])
    size += put_unless_empty(out, tags.SAMPLED_SEQUENCE__TOKENS, sequence.token_numbers.memory)
    if sequence.logprob_numbers is not None:
        memory = sequence.logprob_numbers.memory
        size += put_bytes(out, tags.SAMPLED_SEQUENCE__LOGPROBS, memory)
    if (topk := sequence.topk_logprobs_np) is not None:
        place = tags.SAMPLED_SEQUENCE__TOPK_SAMPLED_LOGPROBS
        size += put_message(out, place, _write_topk, topk)
    return size


def _read_sequence(reader: Reader, start: int, stop: int, sequence_id: str) -> SampledSequence:
    code = tags.STOP_REASON_STOP
    tokens = _NO_TOKENS
    logprobs: Numbers | None = None
    topk: TopkLogprobs | None = None
    for tag, at, end in reader.message(start, stop):
        if tag == tags.SAMPLED_SEQUENCE__STOP_REASON:
            code = at
        elif tag == tags.SAMPLED_SEQUENCE__TOKENS:
            tokens = numbers_of(reader.array(at, end), "int32", "tokens")
        elif tag == tags.SAMPLED_SEQUENCE__LOGPROBS:
            logprobs = _floats(reader, at, end)
        elif tag == tags.SAMPLED_SEQUENCE__TOPK_SAMPLED_LOGPROBS:
            topk = _read_topk(reader, at, end)
    if code not in _STOP_REASONS:
        raise DecodeError(f"a sequence stopped for reason {code}, which is not known")
    return SampledSequence(_STOP_REASONS[code], sequence_id, tokens, logprobs, topk)


def _floats(reader: Reader, start: int, stop: int) -> Numbers | None:
    """Logprobs; none at all means that they were not asked for."""
    return numbers_of(reader.array(start, stop), "float32", "logprobs") if stop > start else None


def _write_topk(out: Parts, topk: TopkLogprobs) -> int:
    return (
        put_unless_empty(out, tags.TOPK_LOGPROBS__TOKEN_IDS, topk.id_numbers.memory)
        + put_unless_empty(out, tags.TOPK_LOGPROBS__LOGPROBS, topk.logprob_numbers.memory)
        + put_int(out, tags.TOPK_LOGPROBS__K, topk.k)
        + put_int(out, tags.TOPK_LOGPROBS__LENGTH, topk.length)
    )


def _read_topk(reader: Reader, start: int, stop: int) -> TopkLogprobs | None:
    ids = logprobs = memoryview(b"")
    k = length = 0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.TOPK_LOGPROBS__TOKEN_IDS:
            ids = reader.array(at, end)
        elif tag == tags.TOPK_LOGPROBS__LOGPROBS:
            logprobs = reader.array(at, end)
        elif tag == tags.TOPK_LOGPROBS__K:
            k = at & 0xFFFFFFFF
        elif tag == tags.TOPK_LOGPROBS__LENGTH:
            length = at & 0xFFFFFFFF
    if not k or not length:
        return None
    if not len(ids) == len(logprobs) == 4 * k * length:
        raise DecodeError(
            f"{length} positions of {k} came with {len(ids)} bytes of ids and {len(logprobs)} "
            "of logprobs"
        )
    return TopkLogprobs.of_numbers(Numbers(ids, "int32"), Numbers(logprobs, "float32"), (length, k))


def _write_alt_tokens(out: Parts, drawn: PromptAltTokens) -> int:
    return put_message(
        out, tags.PROMPT_ALT_TOKENS__TOKENS, write_tensor, drawn.tokens
    ) + put_message(out, tags.PROMPT_ALT_TOKENS__LOGPROBS, write_tensor, drawn.logprobs)


def _read_alt_tokens(reader: Reader, start: int, stop: int) -> PromptAltTokens:
    tokens: TensorData | None = None
    logprobs: TensorData | None = None
    for tag, at, end in reader.message(start, stop):
        if tag == tags.PROMPT_ALT_TOKENS__TOKENS:
            tokens = read_tensor(reader, at, end)
        elif tag == tags.PROMPT_ALT_TOKENS__LOGPROBS:
            logprobs = read_tensor(reader, at, end)
    if tokens is None or logprobs is None:
        raise DecodeError("prompt_alt_tokens came without its tokens or its logprobs")
    return PromptAltTokens(tokens, logprobs)


# Settings of a loss


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
