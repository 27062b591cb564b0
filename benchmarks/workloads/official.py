"""The same work done by `tinker` 0.36.0, with the calls that its own clients make.

Its `ModelInput` takes no arrays, so where a user holds one, `.tolist()` is part of the work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
from tinker import types
from tinker._compat import model_dump
from tinker.proto import tinker_public_pb2 as messages
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from benchmarks.harness.work import Work
from benchmarks.workloads import data

# Training requests


def train_lists(tokens: int, count: int) -> Work:
    return _train(data.examples(tokens, count))


def train_mixed(tokens: int, count: int) -> Work:
    return _train(data.mixed_examples(tokens, count))


def train_arrays(tokens: int, count: int) -> Work:
    return _train(data.array_examples(tokens, count))


def _train(examples: list[data.Example]) -> Work:
    def run() -> bytes:
        datums = [
            types.Datum(
                model_input=types.ModelInput.from_ints(_as_list(example.tokens)),
                loss_fn_inputs={"target_tokens": example.targets, "weights": example.weights},
            )
            for example in examples
        ]
        given = types.ForwardBackwardInput(data=datums, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(
            forward_backward_input=given, model_id="model", seq_id=1
        )
        message = forward_backward_request_to_proto(request)
        message.forward_only = False
        return message.SerializeToString()

    return Work(run, examples, len)


def _as_list(tokens: Any) -> list[int]:
    return tokens if isinstance(tokens, list) else tokens.tolist()


# Sample requests


def sample_list(tokens: int) -> Work:
    return _sample(data.prompt(tokens))


def sample_array(tokens: int) -> Work:
    return _sample(numpy.array(data.prompt(tokens)))


def _sample(prompt: data.Values) -> Work:
    def run() -> bytes:
        request = types.SampleRequest(
            sampling_session_id="session",
            seq_id=1,
            num_samples=1,
            prompt=types.ModelInput.from_ints(_as_list(prompt)),
            sampling_params=types.SamplingParams(max_tokens=4096, temperature=0.7),
        )
        body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
        # As httpx writes what it is given as `json`.
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8")

    return Work(run, prompt, len)


# Sample responses


def answer_arrays(tokens: int) -> Work:
    return _answer(_answer_message(tokens), lambda one: (one.tokens_np, one.logprobs_np))


def answer_lists(tokens: int) -> Work:
    return _answer(_answer_message(tokens), lambda one: (one.tokens, one.logprobs))


def topk_decode(tokens: int, k: int) -> Work:
    return _answer(_topk_message(tokens, k), lambda _: None)


def topk_arrays(tokens: int, k: int) -> Work:
    return _answer(_topk_message(tokens, k), lambda one: one.topk_logprobs_np)


def topk_read(tokens: int, k: int) -> Work:
    return _answer(_topk_message(tokens, k), _read_cells)


def topk_lists(tokens: int, k: int) -> Work:
    return _answer(
        _topk_message(tokens, k), lambda one: (one.tokens, one.logprobs, one.topk_logprobs)
    )


def _answer(message: Any, take: Callable[[Any], Any]) -> Work:
    body = message.SerializeToString()

    def run() -> Any:
        (sequence,) = deserialize_sample_response(body).sequences
        return sequence, take(sequence)

    return Work(run, body, lambda _: len(body))


def _read_cells(sequence: Any) -> float:
    total = 0.0
    for row in sequence.topk_logprobs or ():
        for token, logprob in row or ():
            total += token * logprob
    return total


def _answer_message(tokens: int) -> Any:
    ids, logprobs = data.answer(tokens)
    message = messages.SampleResponse()
    sequence = message.sequences.add(stop_reason=messages.STOP_REASON_LENGTH)
    sequence.tokens = numpy.array(ids, dtype=numpy.int32).tobytes()
    sequence.logprobs = numpy.array(logprobs, dtype=numpy.float32).tobytes()
    return message


def _topk_message(tokens: int, k: int) -> Any:
    message = _answer_message(tokens)
    ids, logprobs = data.answer(tokens * k)
    topk = message.sequences[0].topk_sampled_logprobs
    topk.token_ids = numpy.array(ids, dtype=numpy.int32).tobytes()
    topk.logprobs = numpy.array(logprobs, dtype=numpy.float32).tobytes()
    topk.k, topk.length = k, tokens
    return message


# Training results


def output_arrays(tokens: int, count: int) -> Work:
    return _output(tokens, count, lambda tensor: tensor.to_numpy())


def output_lists(tokens: int, count: int) -> Work:
    return _output(tokens, count, lambda tensor: tensor.data)


def _output(tokens: int, count: int, take: Callable[[Any], Any]) -> Work:
    body = _output_body(tokens, count)

    def run() -> Any:
        output = deserialize_forward_backward_output(body)
        return output, [take(one["logprobs"]) for one in output.loss_fn_outputs]

    return Work(run, body, lambda _: len(body))


def _output_body(tokens: int, count: int) -> bytes:
    _, logprobs = data.answer(tokens)
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:mean"] = 1.5
    record = message.loss_fn_outputs.add(num_datums=count)
    column = record.fields["logprobs"]
    column.data = numpy.array(logprobs, dtype=numpy.float32).tobytes() * count
    offsets = 4 * tokens * numpy.arange(count + 1, dtype=numpy.int64)
    column.offsets = offsets.tobytes()
    column.dtype = messages.DTYPE_FLOAT32
    return bytes(message.SerializeToString())
