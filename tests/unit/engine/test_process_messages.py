"""What crosses the border between processes: the same values, bounded, and no pickle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import tinsmith
from tinsmith.engine.base import (
    AdapterId,
    AdapterSpec,
    EngineCapacity,
    PassWork,
    SampleOutcome,
    SampleTokens,
    SampleWork,
    StepWork,
    TrainingOutcome,
    WeightsId,
)
from tinsmith.engine.process import connection, messages
from tinsmith.engine.process.encoding import BodyDecoder, BodyEncoder
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import (
    BadRequestError,
    DecodeError,
    StorageFullError,
    ValidationError,
)
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import PromptAltTokens
from tinsmith.types.topk import TopkLogprobs

SPARSE = TensorData(
    [2, 3], "int64", [2, 9], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 5]
)
FLOATS = TensorData([1.5, math.inf, -0.0, math.nan], "float32", [2, 2])


def _there_and_back(message: Any, kind: Any) -> Any:
    decoder: BodyDecoder[Any] = BodyDecoder(kind)
    return decoder.decode(BodyEncoder().encode(message))


def _datum() -> Datum:
    tokens = ModelInput.from_ints([1, 2, 3]).append(
        ImageChunk(data=b"\0\xff", format="png", expected_tokens=2)
    )
    given = Datum.received(tokens, {"target_tokens": SPARSE, "weights": FLOATS})
    return given.with_provenance(
        [PromptProvenanceSpan(sequence_id="p", length=5)],
        [SampledProvenanceSpan(sequence_id="s", offset=1, length=2)],
    )


def _calls() -> list[Any]:
    adam = AdapterSpec(
        adapter_id=AdapterId("a"),
        base_model="b",
        lora=LoraConfig(rank=4, seed=1),
        optimizer=AdamOptimizerConfig(),
    )
    passed = PassWork(
        work_id="p",
        adapter_id=AdapterId("a"),
        data=(_datum(), _datum()),
        loss_fn="ppo",
        loss_config={"clip": 0.5, "name": "x"},
    )
    steps = [
        StepWork(work_id="s", adapter_id=AdapterId("a"), params=params)
        for params in (AdamParams(learning_rate=0.1), DimuonParams(learning_rate=0.2))
    ]
    request = SampleRequest(
        prompt=ModelInput.from_ints(list(range(200))),
        sampling_params=SamplingParams(stop=["\n", 5], max_tokens=3),
        target_prompt_logprobs=SPARSE,
    )
    sample = SampleWork(
        work_id="w", base_model="b", weights_id=WeightsId("v"), request=request, owner="o"
    )
    spec = EngineSpec(engine="fake", models=(ModelSource("m", "path", None, "folder"),))
    return [
        messages.OpenEngine(0, spec, {"": 10}),
        messages.CreateAdapter(1, adam),
        messages.LoadAdapter(
            2,
            AdapterSpec(
                adapter_id=AdapterId("d"),
                base_model="b",
                lora=LoraConfig(rank=1),
                optimizer=DimuonOptimizerConfig(),
            ),
            "/a folder",
            7,
        ),
        messages.SaveAdapter(3, AdapterId("a"), "/ä", 3, wants_digest=True),
        messages.DropAdapter(4, AdapterId("a")),
        messages.Train(5, messages.sent_works((passed, *steps))),
        messages.LoadWeights(6, WeightsId("v"), "b", "/f"),
        messages.DropWeights(7, WeightsId("v")),
        messages.StepSampler(2**62),
        messages.AdmitSample(sample),
        messages.CancelSample("w"),
    ]


def _response() -> SampleResponse:
    topk = TopkLogprobs([[1, 2], [3, 0]], [[-0.5, -1.0], [-0.1, -99999.0]])
    sequence = SampledSequence("stop", "id", [1, 2], [-0.5, -0.25], topk)
    alternatives = PromptAltTokens(
        TensorData([[1, 2]], "int64", [1, 2]), TensorData([[0.5, 1.5]], "float32", [1, 2])
    )
    return SampleResponse([sequence, sequence], [math.nan, -1.0], topk, FLOATS, 7, alternatives)


def _replies() -> list[Any]:
    output = ForwardBackwardOutput("t", [{"logprobs": FLOATS}, {}], {"loss:sum": 1.25})
    capacity = EngineCapacity(
        most_adapters=1, adapters=0, most_samples=2, samples=1, batch_tokens=3, adapter_bytes=4
    )
    outcomes = [
        TrainingOutcome(work_id="p", result=output),
        TrainingOutcome(work_id="s", result=OptimStepResponse(metrics={"x": 1.0})),
    ]
    events = (
        SampleTokens(work_id="w", sequence=1, tokens=(1, 2), logprobs=(-0.5, -1.5)),
        SampleOutcome(work_id="w", result=_response()),
    )
    return [
        messages.CallReply(1, outcomes=tuple(map(messages.sent_outcome, outcomes))),
        messages.CallReply(2, events=events, capacity=capacity),
        messages.ChildLogLine({"msg": "x", "levelno": 10, "created": 1.5, "stack_info": None}),
    ]


@pytest.mark.parametrize("message", _calls(), ids=lambda one: type(one).__name__)
def test_calls_and_orders_arrive_as_they_were_sent(message: Any) -> None:
    """With every array, bit for bit."""
    assert _there_and_back(message, messages.ToChild) == message


@pytest.mark.parametrize("message", _replies(), ids=lambda one: type(one).__name__)
def test_replies_arrive_as_they_were_sent(message: Any) -> None:
    """Results, events and log lines."""
    assert _there_and_back(message, messages.ToParent) == message


def test_works_and_outcomes_are_what_they_were_before() -> None:
    """Steps of every optimizer, and results of either kind."""
    works = (
        StepWork(work_id="s", adapter_id=AdapterId("a"), params=DimuonParams(learning_rate=0.2)),
        StepWork(work_id="t", adapter_id=AdapterId("a"), params=AdamParams()),
    )
    outcome = TrainingOutcome(work_id="s", result=OptimStepResponse(metrics=None))

    assert messages.received_works(messages.sent_works(works)) == list(works)
    assert messages.received_outcome(messages.sent_outcome(outcome)) == outcome


def test_numbers_of_numpy_in_metrics_become_plain_ones() -> None:
    output = ForwardBackwardOutput("t", [], {"loss:sum": numpy.float64(0.1)})
    reply = messages.CallReply(1, outcomes=(messages.SentOutcome("w", output),))
    [outcome] = _there_and_back(reply, messages.ToParent).outcomes

    assert type(outcome.passed.metrics["loss:sum"]) is float
    assert outcome.passed == output


class _OwnError(Exception):
    """One that the other process does not know."""


@pytest.mark.parametrize(
    ("error", "arrives_as", "told"),
    [
        (BadRequestError("bad", remedy="mend it"), BadRequestError, "bad; mend it"),
        (StorageFullError("full", reason="no room"), StorageFullError, "full"),
        (MemoryError("no more"), MemoryError, "no more"),
        (KeyError("k"), KeyError, "'k'"),
        (_OwnError("odd"), RuntimeError, "_OwnError: odd"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "why"), RuntimeError, "UnicodeDecodeError: "),
        (OSError(28, "disk"), OSError, "[Errno 28] disk"),
    ],
)
def test_errors_keep_what_the_receiver_may_know(
    error: BaseException, arrives_as: type, told: str
) -> None:
    """The class if it is on the list, the message, the remedy, the notes."""
    error.add_note("a note")
    reply = _there_and_back(messages.CallReply(1, error=error), messages.ToParent)
    found: Any = reply.error

    assert type(reply.error) is arrives_as
    assert str(found).startswith(told)
    assert "a note" in found.__notes__
    if isinstance(error, StorageFullError):
        assert found.reason == "no room"
    assert str(found).startswith(told)
    assert type(found) is arrives_as


# Hostile bytes


def _train() -> bytes:
    return BodyEncoder().encode(_calls()[5])


def _with_header_length(body: bytes, length: int) -> bytes:
    return struct.pack("<I", length) + body[4:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda body: body[:3],
        lambda body: body[:-1],
        lambda body: body + b"\0",
        lambda body: body[: len(body) // 2],
        lambda body: _with_header_length(body, 2**32 - 1),
        lambda body: _with_header_length(body, 0),
        lambda body: _with_header_length(body, 10),
        lambda body: body.replace(b"Train", b"Nopes"),
        lambda body: body.replace(struct.pack("<Q", 12), struct.pack("<Q", 2**63), 1),
        lambda body: body.replace(struct.pack("<Q", 12), struct.pack("<Q", 13), 1),
        lambda _: pickle.dumps(["pickled"]),
    ],
)
def test_a_malformed_body_is_refused_before_its_lengths_are_used(
    damage: Callable[[bytes], bytes],
) -> None:
    """As one error, whatever is wrong with it."""
    decoder: BodyDecoder[Any] = BodyDecoder(messages.ToChild)
    with pytest.raises(DecodeError):
        decoder.decode(damage(_train()))
    assert decoder.decode(_train()) == _calls()[5]


def test_every_flipped_byte_gives_a_value_or_an_error_of_ours() -> None:
    """And nothing else: no other exception, and no endless allocation."""
    decoder: BodyDecoder[Any] = BodyDecoder(messages.ToChild)
    body = bytearray(_train())
    for place in range(len(body)):
        for flip in (0x01, 0x80, 0xFF):
            body[place] ^= flip
            with contextlib.suppress(DecodeError):
                decoder.decode(bytes(body))
            body[place] ^= flip


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    async def test() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((2**63).to_bytes(8, "little"))
        with pytest.raises(DecodeError, match="the limit is 1000"):
            await connection.read_body(reader, most_bytes=1000)

    asyncio.run(test())


# Versions


def test_another_version_of_the_protocol_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the parent, which closes the process."""

    async def test() -> None:
        engine = ProcessEngine(EngineSpec(engine="fake", models=(ModelSource("m", "p"),)))
        told = f"speaks version {messages.VERSION} of the engine protocol, and this one version 99"
        monkeypatch.setattr(messages, "VERSION", 99)
        with pytest.raises(ValidationError, match=told) as caught:
            await engine.open()
        assert "same version of tinsmith" in str(caught.value.remedy)
        assert engine.pid is None

    asyncio.run(test())


def test_a_process_refuses_a_parent_of_another_version() -> None:
    """It says so and exits, without creating an engine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", connection.PROGRAM, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        ours_version = str(messages.VERSION).encode()
        greeting = messages.hello().replace(b"protocol " + ours_version, b"protocol 99")
        ours.sendall(len(greeting).to_bytes(8, "little") + greeting)
        _, told = process.communicate(timeout=60)

    assert process.returncode == 3
    assert b"speaks version 99 of the engine protocol, and this one version " + ours_version in told


# No pickle


def test_no_module_of_the_engines_or_the_service_uses_pickle() -> None:
    """Neither to send nor to store."""
    package = Path(tinsmith.__file__).parent
    uses = re.compile(r"\b(import (c?pickle|marshal|dill|cloudpickle)|from pickle|torch\.load\()")
    found = [
        path
        for folder in ("engine", "service", "checkpoints", "wire")
        for path in (package / folder).rglob("*.py")
        if uses.search(path.read_text())
    ]

    assert found == []


def test_a_call_in_a_process_never_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every use would raise; the process has its own guard."""

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)

    async def test() -> None:
        spec = EngineSpec(engine=f"{__name__}:engine_without_pickle")
        async with asyncio.timeout(60), ProcessEngine(spec) as engine:
            adapter = AdapterSpec(
                adapter_id=AdapterId("a"),
                base_model="m",
                lora=LoraConfig(rank=2),
                optimizer=AdamOptimizerConfig(),
            )
            await engine.create_adapter(adapter)
            work = PassWork(
                work_id="p",
                adapter_id=AdapterId("a"),
                data=(
                    Datum(
                        ModelInput.from_ints([1, 2]),
                        {"target_tokens": [2, 3], "weights": [1.0, 1.0]},
                    ),
                ),
                loss_fn="cross_entropy",
            )
            [outcome] = await engine.train([work])
            assert outcome.error is None
            [failed] = await engine.train(
                [StepWork(work_id="s", adapter_id=AdapterId("b"), params=AdamParams())]
            )
            assert failed.error is not None

    asyncio.run(test())


def engine_without_pickle() -> Any:
    """A fake engine in a process in which pickling raises."""
    from tinsmith.engine.fake.engine import FakeEngine, fake_model

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        setattr(pickle, name, refuse)
    return FakeEngine([fake_model("m")])
