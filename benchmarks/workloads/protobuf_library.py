"""Our messages written and read by the protobuf library instead of our own codec.

It is given plain arrays and hands out plain arrays, without our types around them: the least that
any use of the library would cost.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy

from benchmarks.harness.work import Work
from benchmarks.workloads import data
from tests.oracle import tinsmith_pb2

messages: Any = tinsmith_pb2  # its names are made when it is loaded


def encode(tokens: int, count: int) -> Work:
    examples = data.array_examples(tokens, count)
    ids = [example.tokens.astype(numpy.int32) for example in examples]
    return Work(lambda: _request(examples, ids).SerializeToString(), examples, len)


def _request(examples: list[data.Example], ids: list[Any]) -> Any:
    request = messages.ForwardBackwardRequest(model_id="model", seq_id=1, loss_fn="cross_entropy")
    for example, tokens in zip(examples, ids, strict=True):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, values, code in (
            ("target_tokens", example.targets, messages.DTYPE_INT64),
            ("weights", example.weights, messages.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = values.tobytes()
            tensor.dtype = code
            tensor.shape.append(len(values))
    return request


def decode_request(tokens: int, count: int) -> Work:
    examples = data.array_examples(tokens, count)
    ids = [example.tokens.astype(numpy.int32) for example in examples]
    body = _request(examples, ids).SerializeToString()
    dtypes = {messages.DTYPE_INT64: numpy.int64, messages.DTYPE_FLOAT32: numpy.float32}

    def run() -> Any:
        request = messages.ForwardBackwardRequest.FromString(body)
        return [
            (
                numpy.frombuffer(datum.model_input[0].encoded_text.tokens, numpy.int32),
                {
                    name: numpy.frombuffer(tensor.dense, dtypes[tensor.dtype])
                    for name, tensor in datum.loss_fn_inputs.items()
                },
            )
            for datum in request.data
        ]

    return Work(run, body, lambda _: len(body))


def decode_topk(tokens: int, k: int) -> Work:
    body = _topk_body(tokens, k)

    def run() -> Any:
        (sequence,) = messages.SampleResponse.FromString(body).sequences
        topk = sequence.topk_sampled_logprobs
        return (
            numpy.frombuffer(sequence.tokens, numpy.int32),
            numpy.frombuffer(sequence.logprobs, numpy.float32),
            numpy.frombuffer(topk.token_ids, numpy.int32).reshape(topk.length, topk.k),
            numpy.frombuffer(topk.logprobs, numpy.float32).reshape(topk.length, topk.k),
        )

    return Work(run, body, lambda _: len(body))


def _topk_body(tokens: int, k: int) -> bytes:
    response = messages.SampleResponse()
    sequence = response.sequences.add(stop_reason=messages.STOP_REASON_LENGTH)
    topk = sequence.topk_sampled_logprobs
    for message, count, names in (
        (sequence, tokens, ("tokens", "logprobs")),
        (topk, tokens * k, ("token_ids", "logprobs")),
    ):
        ids, logprobs = data.answer(count)
        setattr(message, names[0], numpy.array(ids, dtype=numpy.int32).tobytes())
        setattr(message, names[1], numpy.array(logprobs, dtype=numpy.float32).tobytes())
    topk.k, topk.length = k, tokens
    return bytes(response.SerializeToString())


def decode_output(tokens: int, count: int) -> Work:
    body = _output_body(tokens, count)

    def run() -> Any:
        output = messages.ForwardBackwardOutput.FromString(body)
        column = output.loss_fn_outputs[0].fields["logprobs"]
        values = numpy.frombuffer(column.data, numpy.float32)
        offsets = numpy.frombuffer(column.offsets, numpy.int64) // 4
        return [values[start:stop] for start, stop in pairwise(offsets)]

    return Work(run, body, lambda _: len(body))


def _output_body(tokens: int, count: int) -> bytes:
    _, logprobs = data.answer(tokens)
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics["loss:mean"] = 1.5
    column = output.loss_fn_outputs.add(num_datums=count).fields["logprobs"]
    column.data = numpy.array(logprobs, dtype=numpy.float32).tobytes() * count
    column.offsets = (4 * tokens * numpy.arange(count + 1, dtype=numpy.int64)).tobytes()
    column.dtype = messages.DTYPE_FLOAT32
    return bytes(output.SerializeToString())
