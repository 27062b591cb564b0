"""Samples whose token ids lie behind the JSON text: the same requests, and nothing believed."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.wire.test_fuzz_decoders import MUTATIONS, fuzz, is_refused, mutated
from tinsmith.errors import BodyTooLargeError, DecodeError
from tinsmith.types import ImageChunk, ModelInput, SamplingParams, TensorData
from tinsmith.types.inputs import EncodedTextChunk, ModelInputChunk
from tinsmith.types.requests import SampleRequest
from tinsmith.wire import packed_format
from tinsmith.wire.content import PACKED_TYPE
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import packed_request, read_request, request_from_fields
from tinsmith.wire.packed_format import MIN_PACKED, PackedText
from tinsmith.wire.protobuf import Parts

SAMPLE_ROUTES = ["asample", "asample_stream"]
LONG = list(range(MIN_PACKED))
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=2 * MIN_PACKED)
IMAGES = st.builds(
    ImageChunk, data=st.binary(max_size=20), format=st.just("png"), expected_tokens=st.just(3)
)
CHUNKS: st.SearchStrategy[list[ModelInputChunk]] = st.lists(
    st.builds(EncodedTextChunk, TOKENS) | IMAGES, max_size=5
)


def a_sample(*chunks: ModelInputChunk, **fields: Any) -> SampleRequest:
    params = SamplingParams(max_tokens=4, stop=["\0", '{"packed": 1}'])
    return SampleRequest(prompt=ModelInput(chunks), sampling_params=params, **fields)


def read(endpoint: str, body: bytes | memoryview, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """What a service makes of a packed body."""
    return read_request(ENDPOINTS[endpoint], {}, {}, {"content-type": PACKED_TYPE}, body, limits)


def a_body(plain: Any, arrays: bytes = b"", length: int | None = None) -> bytes:
    """A packed body by hand."""
    text = json.dumps(plain).encode()
    return struct.pack("<I", len(text) if length is None else length) + text + arrays


def prompt_of(*tokens: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": given} for given in tokens]
    return {"prompt": {"chunks": chunks}, "sampling_params": {}}


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


@pytest.mark.parametrize("endpoint", SAMPLE_ROUTES)
@given(chunks=CHUNKS)
def test_a_packed_sample_round_trips(endpoint: str, chunks: list[ModelInputChunk]) -> None:
    request = a_sample(*chunks, seq_id=7, sampling_session_id="s")

    body = b"".join(packed_format.encode(request).body())

    assert read(endpoint, body) == read(endpoint, memoryview(bytearray(body))) == request


@given(prompts=st.lists(CHUNKS, min_size=1, max_size=4))
def test_many_packed_samples_round_trip(
    prompts: list[list[ModelInputChunk]],
) -> None:
    requests = [a_sample(*chunks, seq_id=number) for number, chunks in enumerate(prompts)]
    written = [packed_format.encode(request) for request in requests]
    text: Parts = [b'{"samples":[']
    for one in written:
        text += [*one.text, b","]
    text[-1] = b"]}"
    arrays: Parts = [array for one in written for array in one.arrays]

    many = read("asample_many", b"".join(PackedText(text, arrays).body()))

    again = [request_from_fields(ENDPOINTS["asample"], fields) for fields in many.samples]
    assert again == requests


def test_long_arrays_are_sent_without_copying() -> None:
    chunk = EncodedTextChunk(list(range(5000)))

    packed = packed_format.encode(a_sample(chunk, chunk))

    assert [array is chunk.numbers.memory for array in packed.arrays] == [True, True]
    assert [array is chunk.numbers.memory for array in packed.body()[1:]] == [True, True]


def test_short_arrays_are_joined() -> None:
    packed = packed_format.encode(a_sample(*[EncodedTextChunk(LONG)] * 50))

    assert len(packed.arrays) == 50
    assert len(packed.body()) <= 2
    assert packed.size + 4 == sum(map(len, packed.body()))


def test_the_packed_format_is_as_documented() -> None:
    request = a_sample(EncodedTextChunk(LONG), EncodedTextChunk([5]))

    body = b"".join(packed_format.encode(request).body())

    length = struct.unpack_from("<I", body)[0]
    chunks = json.loads(body[4 : 4 + length])["prompt"]["chunks"]
    assert chunks == [
        {"tokens": {"packed": MIN_PACKED}, "type": "encoded_text"},
        {"tokens": [5], "type": "encoded_text"},
    ]
    assert body[4 + length :] == struct.pack(f"<{MIN_PACKED}i", *LONG)


def test_short_prompts_are_plain_json() -> None:
    request = a_sample(EncodedTextChunk(LONG[1:]))

    sent = packed_request(ENDPOINTS["asample"], packed_format.encode(request))

    assert sent.headers["Content-Type"] == "application/json"
    assert json.loads(b"".join(sent.parts))["prompt"]["chunks"][0]["tokens"] == LONG[1:]


def test_tensors_stay_in_the_json_part() -> None:
    targets = TensorData(list(range(200)), "int64", [100, 2])
    request = a_sample(EncodedTextChunk(LONG), target_prompt_logprobs=targets)

    packed = packed_format.encode(request)

    assert len(packed.arrays) == 1
    assert read("asample", b"".join(packed.body())) == request


def test_a_decoded_request_does_not_keep_the_body_alive() -> None:
    body = bytearray(a_body(prompt_of({"packed": 2}), ids(5, 6)))

    request = read("asample", memoryview(body))
    body[-8:] = bytes(8)

    assert request.prompt.to_ints() == [5, 6]


HOSTILE = {
    "nothing but a length": b"\0\0\0\0",
    "half a length": b"\1\0",
    "a length past the end": a_body(prompt_of([1]), length=10_000),
    "the largest length": a_body(prompt_of([1]), length=2**32 - 1),
    "a length inside the text": a_body(prompt_of([1]), length=20),
    "text that is no JSON": struct.pack("<I", 3) + b"{,}",
    "text that is no object": a_body([prompt_of([1])]),
    "a count that is too large": a_body(prompt_of({"packed": 3}), ids(1, 2)),
    "a count that is too small": a_body(prompt_of({"packed": 1}), ids(1, 2)),
    "a count beyond all memory": a_body(prompt_of({"packed": 2**62}), ids(1, 2)),
    "a count of 4000 digits": a_body(prompt_of({"packed": 10**4000}), ids(1, 2)),
    "a negative count": a_body(prompt_of({"packed": 2}, {"packed": -2}), ids(1, 2)),
    "a count that is no number": a_body(prompt_of({"packed": True}), ids(1)),
    "half a count": a_body(prompt_of({"packed": 1.5}), ids(1, 2)[:6]),
    "no count": a_body(prompt_of({}), b""),
    "half a token": a_body(prompt_of({"packed": 2}), ids(1, 2)[:7]),
    "a byte too many": a_body(prompt_of({"packed": 2}), ids(1, 2) + b"\0"),
    "arrays that nothing names": a_body(prompt_of([1, 2]), ids(1, 2)),
    "two chunks for one array": a_body(prompt_of({"packed": 2}, {"packed": 2}), ids(1, 2)),
    "a negative token": a_body(prompt_of({"packed": 3}), ids(1, -1, 2)),
    "the smallest token": a_body(prompt_of({"packed": 1}), ids(-(2**31))),
    "an array beside the prompt": a_body({**prompt_of([1]), "tokens": {"packed": 1}}, ids(1)),
    "arrays in the wrong place": a_body({"prompt": {"chunks": {"tokens": {"packed": 1}}}}, ids(1)),
}


@pytest.mark.parametrize("endpoint", SAMPLE_ROUTES)
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_an_inconsistent_body_is_rejected(endpoint: str, body: bytes) -> None:
    with pytest.raises(DecodeError):
        read(endpoint, body)


@pytest.mark.parametrize(
    ("counts", "arrays"),
    [((2, 3), ids(1, 2, 3, 4)), ((2, 1), ids(1, 2, 3, 4)), ((2, 2), ids(1, 2, 3, -4))],
    ids=["too few bytes", "too many bytes", "a negative token"],
)
def test_inconsistent_samples_in_a_batch_are_rejected(
    counts: tuple[int, int], arrays: bytes
) -> None:
    samples = [prompt_of({"packed": count}) for count in counts]

    with pytest.raises(DecodeError):
        read("asample_many", a_body({"samples": samples}, arrays))


def test_an_empty_array_is_an_empty_list() -> None:
    assert read("asample", a_body(prompt_of({"packed": 0}))).prompt.to_ints() == []


@fuzz
@given(route=st.sampled_from([*SAMPLE_ROUTES, "asample_many"]), body=st.binary(max_size=200))
@example(route="asample", body=b"\2\0\0\0{}")
def test_any_bytes_give_a_request_or_a_typed_error(route: str, body: bytes) -> None:
    is_refused(lambda body: read(route, body), body)


VALID = b"".join(
    packed_format.encode(a_sample(EncodedTextChunk(LONG), EncodedTextChunk(LONG))).body()
)


@fuzz
@given(mutations=MUTATIONS)
def test_a_corrupted_body_returns_a_request_or_raises_a_typed_error(
    mutations: list[tuple[str, int, int, bytes]],
) -> None:
    is_refused(lambda body: read("asample", body), mutated(VALID, mutations))


def test_a_packed_body_truncated_anywhere_is_rejected() -> None:
    for length in range(1, len(VALID)):
        with pytest.raises(DecodeError):
            read("asample", VALID[:length])


def test_every_single_bit_may_be_flipped() -> None:
    for bit in range(8 * len(VALID)):
        spoiled = bytearray(VALID)
        spoiled[bit // 8] ^= 1 << bit % 8
        is_refused(lambda body: read("asample", body), bytes(spoiled))


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_every_endpoint_accepts_or_rejects_a_packed_body(endpoint: Endpoint) -> None:
    refused = is_refused(lambda body: read(endpoint.name, body), VALID)

    assert refused is (endpoint.name not in SAMPLE_ROUTES)


def test_a_body_above_the_limit_is_rejected_before_it_is_parsed() -> None:
    with pytest.raises(BodyTooLargeError):
        read("asample", VALID, DecodeLimits(memory_bytes=len(VALID) - 1))


def test_text_that_could_use_too_much_memory_is_rejected() -> None:
    body = a_body(prompt_of(*[[]] * 1000))

    with pytest.raises(BodyTooLargeError):
        read("asample", body, DecodeLimits(memory_bytes=2 * len(body)))


def test_text_and_arrays_share_one_limit() -> None:
    chunks: list[list[int]] = [[]] * 1000
    tokens = 50_000
    text = a_body(prompt_of(*chunks))
    both = a_body(prompt_of(*chunks, {"packed": tokens}), bytes(4 * tokens))
    limits = DecodeLimits(memory_bytes=20 * len(text))

    assert read("asample", text, limits).prompt.length == 0
    assert read("asample", both).prompt.length == tokens
    with pytest.raises(BodyTooLargeError):
        read("asample", both, limits)


def test_decoding_uses_about_as_much_memory_as_the_arrays() -> None:
    tokens = 1_000_000
    body = a_body(prompt_of({"packed": tokens}), bytes(4 * tokens))
    limits = DecodeLimits(memory_bytes=2 * len(body))
    tracemalloc.start()
    try:
        request = read("asample", body, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert request.prompt.length == tokens
    assert peak < 1.3 * len(body)


def test_unknown_fields_are_ignored() -> None:
    plain = prompt_of({"packed": 2, "dtype": "int32"})

    body = a_body({**plain, "zzz": msgspec.to_builtins([1])}, ids(1, 2))

    assert read("asample", body).prompt.to_ints() == [1, 2]
