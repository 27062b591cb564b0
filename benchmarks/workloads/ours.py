"""What tinsmith does, from the user's numbers to the body and from the body to the user's numbers.

Requests are made twice: as one body, and in parts whose arrays are the types' own memory, which is
what a transport that writes in pieces sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.work import Work
from benchmarks.workloads import data
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)
from tinsmith.types.buffers import Memory
from tinsmith.wire import exchange, proto_format, proto_samples
from tinsmith.wire.endpoints import ENDPOINTS

# Training requests


def train_lists(tokens: int, count: int) -> Work:
    return _train(data.examples(tokens, count), b"".join, len)


def train_lists_parts(tokens: int, count: int) -> Work:
    return _train(data.examples(tokens, count), list, _size)


def train_mixed(tokens: int, count: int) -> Work:
    return _train(data.mixed_examples(tokens, count), b"".join, len)


def train_mixed_parts(tokens: int, count: int) -> Work:
    return _train(data.mixed_examples(tokens, count), list, _size)


def train_arrays(tokens: int, count: int) -> Work:
    return _train(data.array_examples(tokens, count), b"".join, len)


def train_arrays_parts(tokens: int, count: int) -> Work:
    return _train(data.array_examples(tokens, count), list, _size)


def _train(
    examples: list[data.Example], finish: Callable[[Any], Any], size: Callable[[Any], int]
) -> Work:
    def run() -> Any:
        return finish(
            exchange.to_http(ENDPOINTS["forward_backward"], _training_request(examples)).parts
        )

    return Work(run, examples, size)


def _training_request(examples: list[data.Example]) -> ForwardBackwardRequest:
    datums = [
        Datum(
            ModelInput.from_ints(example.tokens),
            {"target_tokens": example.targets, "weights": example.weights},
        )
        for example in examples
    ]
    return ForwardBackwardRequest(ForwardBackwardInput(datums, "cross_entropy"), "model", 1)


# Sample requests


def sample_list(tokens: int) -> Work:
    return _sample(data.prompt(tokens))


def sample_array(tokens: int) -> Work:
    import numpy

    return _sample(numpy.array(data.prompt(tokens)))


def _sample(prompt: data.Values) -> Work:
    def run() -> Any:
        request = SampleRequest(
            sampling_session_id="session",
            seq_id=1,
            num_samples=1,
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=4096, temperature=0.7),
        )
        return exchange.to_http(ENDPOINTS["asample"], request).parts

    return Work(run, prompt, _size)


# Sample responses


def answer_arrays(tokens: int) -> Work:
    return _answer(_answer_body(tokens), _arrays_of_answer)


def answer_lists(tokens: int) -> Work:
    return _answer(_answer_body(tokens), lambda one: (one.tokens, one.logprobs))


def topk_decode(tokens: int, k: int) -> Work:
    return _answer(_topk_body(tokens, k), lambda _: None)


def topk_arrays(tokens: int, k: int) -> Work:
    return _answer(_topk_body(tokens, k), lambda one: (_arrays_of_answer(one), _matrices(one)))


def topk_read(tokens: int, k: int) -> Work:
    return _answer(_topk_body(tokens, k), _read_cells)


def topk_lists(tokens: int, k: int) -> Work:
    return _answer(
        _topk_body(tokens, k), lambda one: (one.tokens, one.logprobs, list(one.topk_logprobs or ()))
    )


def _answer(body: Memory, take: Callable[[SampledSequence], Any]) -> Work:
    def run() -> Any:
        (sequence,) = proto_samples.decode_sample_response(body).sequences
        return sequence, take(sequence)

    return Work(run, body, lambda _: len(body))


def _arrays_of_answer(sequence: SampledSequence) -> Any:
    return sequence.tokens_np, sequence.logprobs_np


def _matrices(sequence: SampledSequence) -> Any:
    assert sequence.topk_logprobs_np is not None
    return sequence.topk_logprobs_np.token_ids, sequence.topk_logprobs_np.logprobs


def _read_cells(sequence: SampledSequence) -> float:
    total = 0.0
    for row in sequence.topk_logprobs or ():
        for token, logprob in row or ():
            total += token * logprob
    return total


def _answer_body(tokens: int) -> bytes:
    ids, logprobs = data.answer(tokens)
    return _response_body(SampledSequence("length", "", ids, logprobs))


def _topk_body(tokens: int, k: int) -> Memory:
    ids, logprobs = data.answer(tokens)
    topk = TopkLogprobs(*data.answer(tokens * k), shape=(tokens, k))
    body = _response_body(SampledSequence("length", "", ids, logprobs, topk))
    return memoryview(bytearray(body))  # as our transport hands on what came in several pieces


def _response_body(sequence: SampledSequence) -> bytes:
    return b"".join(proto_samples.encode_sample_response(SampleResponse([sequence])))


# Training results


def output_arrays(tokens: int, count: int) -> Work:
    return _output(tokens, count, lambda tensor: tensor.to_numpy())


def output_lists(tokens: int, count: int) -> Work:
    return _output(tokens, count, lambda tensor: tensor.data)


def _output(tokens: int, count: int, take: Callable[[TensorData], Any]) -> Work:
    body = output_body(tokens, count)

    def run() -> Any:
        output = proto_format.decode_forward_backward_output(body)
        return output, [take(one["logprobs"]) for one in output.loss_fn_outputs]

    return Work(run, body, lambda _: len(body))


def output_body(tokens: int, count: int) -> bytes:
    """The body of a training result with logprobs for `count` datums."""
    _, logprobs = data.answer(tokens)
    one = {"logprobs": TensorData(logprobs, "float32", [tokens])}
    output = ForwardBackwardOutput("ArrayRecord", [one] * count, {"loss:mean": 1.5})
    return b"".join(proto_format.encode_forward_backward_output(output))


# The codec alone, for the protobuf library to be held against: types are made before


def codec_encode(tokens: int, count: int) -> Work:
    return _codec_encode(tokens, count, b"".join, len)


def codec_encode_parts(tokens: int, count: int) -> Work:
    return _codec_encode(tokens, count, list, _size)


def _codec_encode(
    tokens: int, count: int, finish: Callable[[Any], Any], size: Callable[[Any], int]
) -> Work:
    examples = data.array_examples(tokens, count)
    request = _training_request(examples)
    encode = proto_format.encode_forward_backward_request
    return Work(lambda: finish(encode(request)), examples, size)


def codec_decode_request(tokens: int, count: int) -> Work:
    examples = data.array_examples(tokens, count)
    encoded = proto_format.encode_forward_backward_request(_training_request(examples))
    body = b"".join(encoded)

    def run() -> Any:
        return proto_format.decode_forward_backward_request(body)

    return Work(run, body, lambda _: len(body))


def codec_decode_topk(tokens: int, k: int) -> Work:
    body = _topk_body(tokens, k)
    return Work(lambda: proto_samples.decode_sample_response(body), body, lambda _: len(body))


def codec_decode_output(tokens: int, count: int) -> Work:
    body = output_body(tokens, count)
    return Work(
        lambda: proto_format.decode_forward_backward_output(body), body, lambda _: len(body)
    )


def _size(parts: Any) -> int:
    return sum(map(len, parts))
