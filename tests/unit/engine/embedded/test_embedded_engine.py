"""What the embedded engine does beyond the contract of all engines: threads, types, closing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.small_models import make_model
from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    PassWork,
    SampleOutcome,
    SampleWork,
    StepWork,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.embedded import model_loading
from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings, free_threads
from tinsmith.engine.embedded.training_pass import run_packed_batch
from tinsmith.errors import BaseModelFormatError, ClosedError, ValidationError
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SamplingParams,
)
from tinsmith.types.requests import SampleRequest

A, W = AdapterId("a"), WeightsId("w")
WAIT_S = 60
Test = Callable[[EmbeddedEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def _engine(folder: Path, **settings: Any) -> EmbeddedEngine:
    models = [
        EmbeddedModel(name="base", folder=folder),
        EmbeddedModel(name="alias", folder=folder, alias_of="base"),
    ]
    given = {"threads": 1, "dtype": "float32", **settings}
    return EmbeddedEngine(models, EmbeddedSettings(**given))


def _run(folder: Path, test: Test, **settings: Any) -> None:
    async def whole() -> None:
        async with _engine(folder, **settings) as engine:
            await asyncio.wait_for(test(engine), WAIT_S)

    asyncio.run(whole())


def _spec(rank: int = 4) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=A,
        base_model="base",
        lora=LoraConfig(rank=rank, seed=1),
        optimizer=AdamOptimizerConfig(),
    )


def _pass(work_id: str = "p") -> PassWork:
    inputs: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    data = (Datum(ModelInput.from_ints([1, 2, 3]), inputs),)
    return PassWork(work_id=work_id, adapter_id=A, data=data, loss_fn="cross_entropy")


def _sample(
    work_id: str = "w", max_tokens: int = 8, weights: WeightsId | None = None, **params: Any
) -> SampleWork:
    given = {"max_tokens": max_tokens, "seed": 7, "stop": [], **params}
    request = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]), sampling_params=SamplingParams(**given)
    )
    return SampleWork(work_id=work_id, base_model="base", weights_id=weights, request=request)


async def _outcome(engine: EmbeddedEngine) -> SampleOutcome:
    while True:
        for event in await engine.step_sampler():
            if isinstance(event, SampleOutcome):
                return event


class Held:
    """Holds up the packs of training until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = threading.Event()
        self.may_go = threading.Event()
        monkeypatch.setattr("tinsmith.engine.embedded.trainer.run_packed_batch", self._run)

    def _run(self, *args: Any, **settings: Any) -> None:
        self.is_reached.set()
        assert self.may_go.wait(WAIT_S)
        run_packed_batch(*args, **settings)


def test_several_names_of_one_folder_share_one_model(folder: Path) -> None:
    """It is loaded once, and adapters and samples may use either name."""

    async def test(engine: EmbeddedEngine) -> None:
        assert engine._transformers["base"] is engine._transformers["alias"]
        assert engine._samplers["base"] is engine._samplers["alias"]
        [base, alias] = engine.base_models()
        assert (alias.alias_of, base.alias_of) == ("base", None)
        assert base.tokenizer_id == str(folder)
        assert (base.vocabulary, base.max_context, base.eos_tokens) == (300, 512, (2,))
        assert base.architecture == "LlamaForCausalLM"

    _run(folder, test)


@pytest.mark.parametrize(("pass_bytes", "tokens"), [(1 << 20, 4 * 141), (1 << 40, 5000)])
def test_one_train_call_fills_a_few_packed_batches_at_most(
    folder: Path, pass_bytes: int, tokens: int
) -> None:
    """So that who comes next does not wait for long; and never more than is set."""

    async def test(engine: EmbeddedEngine) -> None:
        assert engine.capacity().batch_tokens == tokens

    _run(folder, test, pass_bytes=pass_bytes, batch_tokens=5000)


def test_sampling_continues_while_a_batch_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other."""
    held = Held(monkeypatch)

    async def test(engine: EmbeddedEngine) -> None:
        await engine.create_adapter(_spec())
        training = asyncio.create_task(engine.train([_pass()]))
        await asyncio.to_thread(held.is_reached.wait, WAIT_S)

        engine.admit(_sample())
        outcome = await _outcome(engine)

        assert outcome.result is not None and not training.done()
        held.may_go.set()
        [trained] = await training
        assert trained.error is None

    _run(folder, test)


def test_a_save_contains_exactly_the_training_submitted_before_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody waited for the training, and later training does not change the files."""
    held = Held(monkeypatch)

    async def test(engine: EmbeddedEngine) -> None:
        await engine.create_adapter(_spec())
        step = StepWork(work_id="s", adapter_id=A, params=AdamParams(learning_rate=0.1))
        first = asyncio.create_task(engine.train([_pass(), step]))
        await asyncio.to_thread(held.is_reached.wait, WAIT_S)
        folders = [tmp_path / name for name in ("early", "late")]
        for one in folders:
            one.mkdir()
        early = asyncio.create_task(engine.save_adapter(A, folders[0], AdapterParts.CHECKPOINT))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.train([_pass("q"), step]))
        held.may_go.set()
        await asyncio.gather(first, early, second)
        await engine.save_adapter(A, folders[1], AdapterParts.CHECKPOINT)

        steps = [(one / "state.json").read_text().count('"steps": 1') for one in folders]
        assert steps == [1, 0]

    _run(folder, test)


def test_closing_ends_running_and_waiting_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are told that the engine is closed."""
    held = Held(monkeypatch)

    async def test(engine: EmbeddedEngine) -> None:
        await engine.create_adapter(_spec())
        works: list[TrainingWork] = [
            _pass(),
            StepWork(work_id="s", adapter_id=A, params=AdamParams()),
            _pass("q"),
        ]
        running = asyncio.create_task(engine.train(works))
        await asyncio.to_thread(held.is_reached.wait, WAIT_S)
        waiting = asyncio.create_task(engine.train(works))
        engine.admit(_sample(max_tokens=400))
        stepping = asyncio.create_task(engine.step_sampler())
        await asyncio.sleep(0)

        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        held.may_go.set()
        await closing

        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(one) for one in results] == [ClosedError, ClosedError]
        assert await stepping == []
        assert await engine.step_sampler() == []
        with pytest.raises(ClosedError):
            engine.admit(_sample())

    _run(folder, test)


def test_a_sample_that_is_cancelled_and_admitted_again_has_one_outcome(folder: Path) -> None:
    """That of the second admission, however the two threads meet."""

    async def test(engine: EmbeddedEngine) -> None:
        for _ in range(20):
            engine.admit(_sample(max_tokens=4))
            await engine.step_sampler()
            engine.cancel("w")
            engine.admit(_sample(max_tokens=8))
            outcome = await _outcome(engine)
            assert outcome.result is not None
            assert len(outcome.result.sequences[0].tokens) == 8
            assert engine.capacity().samples == 0

    _run(folder, test)


def test_an_adapter_s_sample_is_the_same_alone_and_in_a_batch(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bit for bit, with weights as the engine itself loads them."""
    make_model(tmp_path, hidden_size=96, intermediate_size=208)
    saved = tmp_path_factory.mktemp("saved")

    async def test(engine: EmbeddedEngine) -> None:
        await engine.create_adapter(_spec(rank=32))
        step = StepWork(work_id="s", adapter_id=A, params=AdamParams(learning_rate=0.05))
        await engine.train([_pass(), step])
        await engine.save_adapter(A, saved, AdapterParts.CHECKPOINT)
        await engine.load_weights(W, "base", saved)

        engine.admit(_sample("it", 24, weights=W))
        alone = (await _outcome(engine)).result
        for index in range(9):
            engine.admit(_sample(f"{index}", 40, weights=W, seed=index))
        engine.admit(_sample("it", 24, weights=W))
        found = None
        while found is None:
            outcome = await _outcome(engine)
            found = outcome.result if outcome.work_id == "it" else None

        assert alone is not None
        assert found.sequences[0].tokens == alone.sequences[0].tokens
        assert found.sequences[0].logprobs == alone.sequences[0].logprobs

    _run(tmp_path, test)


def test_a_sampler_that_fails_ends_its_samples_and_keeps_running(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the outcome of those that were running."""

    async def test(engine: EmbeddedEngine) -> None:
        model = engine._transformers["base"]
        with monkeypatch.context() as patched:
            patched.setattr(model, "forward", _fail)
            engine.admit(_sample("lost"))
            outcome = await _outcome(engine)
        assert outcome.work_id == "lost" and isinstance(outcome.error, RuntimeError)

        engine.admit(_sample("next"))
        outcome = await _outcome(engine)
        assert outcome.work_id == "next" and outcome.result is not None

    _run(folder, test)


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def test_a_sample_that_cannot_run_settles_with_an_error(folder: Path) -> None:
    """It does not hold up the others."""

    async def test(engine: EmbeddedEngine) -> None:
        engine.admit(_sample("wrong", stop="text"))  # the model has no tokenizer
        outcome = await _outcome(engine)

        assert outcome.work_id == "wrong" and isinstance(outcome.error, ValidationError)
        assert engine.capacity().samples == 0

    _run(folder, test)


def test_training_and_sampling_in_bfloat16_stay_close_to_float32(folder: Path) -> None:
    """Losses agree to two digits; what is trained stays float32."""

    async def losses(engine: EmbeddedEngine) -> list[float]:
        await engine.create_adapter(_spec())
        step = StepWork(work_id="s", adapter_id=A, params=AdamParams(learning_rate=0.01))
        found = []
        for _ in range(3):
            passed, _stepped = await engine.train([_pass(), step])
            assert isinstance(passed.result, ForwardBackwardOutput), passed.error
            found.append(passed.result.metrics["loss:sum"])
        assert engine._adapters[A].weights.dtype == torch.float32
        return found

    found: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):

        async def test(engine: EmbeddedEngine, dtype: str = dtype) -> None:
            found[dtype] = await losses(engine)

        _run(folder, test, dtype=dtype)

    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)


def test_a_folder_without_a_model_is_an_error_and_leaves_no_thread(tmp_path: Path) -> None:
    """Opening fails; the engine is closed again."""
    before = {one.name for one in threading.enumerate()}

    async def whole() -> None:
        with pytest.raises(BaseModelFormatError, match=r"^the model base: .*config\.json"):
            await _engine(tmp_path).open()

    asyncio.run(whole())

    names = {one.name for one in threading.enumerate()} - before
    assert not any(name.startswith("tinsmith") for name in names)


@pytest.mark.parametrize(
    ("amx", "avx", "fast"),
    [
        (False, False, torch.float32),
        (False, True, torch.bfloat16),
        (True, False, torch.bfloat16),
    ],
)
def test_the_dtype_follows_the_available_hardware(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx: bool, fast: torch.dtype
) -> None:
    """Unless one is asked for; bfloat16 is then held, and computed in where that is fast.

    How busy the machine is has no part in it.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    plain, half = torch.float32, torch.bfloat16

    assert model_loading.choose_dtypes("auto", "cpu") == (fast, fast)
    assert model_loading.choose_dtypes("float32", "cpu") == (plain, plain)
    assert model_loading.choose_dtypes("bfloat16", "cpu") == (half, fast)
    assert model_loading.choose_dtypes("auto", "cuda") == (half, half)


def test_a_missing_device_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto takes the processor then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert model_loading.choose_device("auto") == model_loading.choose_device("cpu") == "cpu"
    with pytest.raises(ValidationError, match="cuda"):
        model_loading.choose_device("cuda")


@pytest.mark.parametrize(("cores", "load", "threads"), [(2, 0.0, 1), (16, 4.2, 4), (2, 9.0, 1)])
def test_threads_are_half_of_the_free_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, load: float, threads: int
) -> None:
    """A power of two, and at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    assert free_threads() == threads


def test_settings_out_of_range_are_rejected() -> None:
    """With the name of the setting."""
    with pytest.raises(ValidationError, match="most_samples"):
        EmbeddedSettings(most_samples=0)
