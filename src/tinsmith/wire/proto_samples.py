"""The protobuf body of a sample's result.

Separate from `proto_format.py`, which clients that only sample do not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.errors import DecodeError
from tinsmith.types.buffers import Memory, Numbers
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, StopReason
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import TopkLogprobs
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.generated import tags
from tinsmith.wire.proto_data import numbers_of, put_unless_empty, read_tensor, write_tensor
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    merged,
    put_bytes,
    put_int,
    put_int32,
    put_message,
    signed32,
)

_STOP_REASONS: dict[int, StopReason] = {
    tags.STOP_REASON_STOP: "stop",
    tags.STOP_REASON_LENGTH: "length",
}
_NO_TOKENS = Numbers(b"", "int32")
_STOP_CODES = {name: code for code, name in _STOP_REASONS.items()}


def encode_sample_response(response: SampleResponse) -> Parts:
    """Encode the result of `asample`, which has no sequence ids."""
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
    """Decode the result of `asample`.

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
        raise DecodeError(
            f"received {len(sequences)} sequences with {len(sequence_ids)} sequence ids"
        )
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
        raise DecodeError(f"unknown stop reason {code} of a sequence")
    return SampledSequence(_STOP_REASONS[code], sequence_id, tokens, logprobs, topk)


def _floats(reader: Reader, start: int, stop: int) -> Numbers | None:
    """Decode logprobs; None if they were not requested."""
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
            f"received {length} positions of {k} with {len(ids)} bytes of ids and {len(logprobs)} "
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
        raise DecodeError("prompt_alt_tokens lacks its tokens or its logprobs")
    return PromptAltTokens(tokens, logprobs)
