"""The promises of `engine/base.py`, held against every engine."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.numerics.small_models import make_model
from tinsmith.client.losses.graph import trace
from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    CustomLossSpec,
    Engine,
    PassWork,
    SampleOutcome,
    SampleTokens,
    SampleWork,
    StepWork,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.embedded.embedded_settings import EmbeddedModel, EmbeddedSettings
from tinsmith.engine.fleet.replica_settings import ReplicaSettings
from tinsmith.engine.registry import make_engine, read_models
from tinsmith.errors import ClosedError, NotFoundError, TinkerError, ValidationError
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinsmith.types.requests import SampleRequest

ENGINES = ["fake", "child of fake", "embedded", "fleet of fake", "fleet of embedded"]
BASE = "test/base"
MODELS = [f"{BASE}=path", "test/alias=path", "test/other"]
A, B = AdapterId("a"), AdapterId("b")
STEP = AdamParams(learning_rate=0.02)

Test = Callable[[Engine, Path], Awaitable[None]]


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of random models, made once."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "path")
    make_model(folder / "other", "Qwen3")
    return folder


def _embedded(folder: Path) -> Engine:
    from tinsmith.engine.embedded.embedded_engine import EmbeddedEngine

    models = [
        EmbeddedModel(
            name=one.name,
            folder=folder / ("path" if one.path == "path" else "other"),
            tokenizer_id=one.tokenizer_id,
            alias_of=one.alias_of,
        )
        for one in read_models(MODELS)
    ]
    return EmbeddedEngine(models, EmbeddedSettings(threads=1, dtype="float32"))


def _fleet(kind: str, folder: Path) -> Engine:
    """Three replicas; adapters and samples are spread over them."""
    models = read_models(MODELS)
    if kind == "embedded":
        models = [
            msgspec.structs.replace(
                one, folder=str(folder / ("path" if one.path == "path" else "other"))
            )
            for one in models
        ]
    settings = EmbeddedSettings(threads=1, dtype="float32", kv_bytes=256 << 20)
    replicas = [ReplicaSettings(count=2 if kind == "embedded" else 3, threads=1)]
    return make_engine(kind, models, settings, replicas=replicas)


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Callable[[], Engine]:
    """Makes an engine of each kind."""
    kind = request.param.rpartition(" ")[2]
    if request.param.startswith("fleet of "):
        return functools.partial(_fleet, kind, request.getfixturevalue("small_models"))
    if kind == "embedded":
        return functools.partial(_embedded, request.getfixturevalue("small_models"))
    return functools.partial(make_engine, kind, MODELS, has_own_process=kind != request.param)


@pytest.fixture(scope="session")
def shared_fleet(small_models: Path) -> Iterator[Callable[[Test, Path], None]]:
    """Runs tests on one fleet, whose processes take seconds to start, and empties it after each."""
    engine = _fleet("embedded", small_models)

    async def whole(test: Test, folder: Path) -> None:
        try:
            await test(engine, folder)
        finally:
            for adapter in (A, B):
                await engine.drop_adapter(adapter)
            await engine.drop_weights(WeightsId("w"))
            if engine.replicas()[0].pid is None:  # the test has closed it
                await engine.open()

    with asyncio.Runner() as runner:
        runner.run(engine.open())
        yield lambda test, folder: runner.run(whole(test, folder))
        runner.run(engine.close())


@pytest.fixture
def run(
    request: pytest.FixtureRequest, make: Callable[[], Engine], tmp_path: Path
) -> Callable[[Test], None]:
    """Runs a test with an open engine."""
    if request.node.callspec.params["make"] == "fleet of embedded":
        shared: Callable[[Test, Path], None] = request.getfixturevalue("shared_fleet")
        return lambda test: shared(test, tmp_path)

    def runner(test: Test) -> None:
        async def whole() -> None:
            async with make() as engine:
                await test(engine, tmp_path)

        asyncio.run(whole())

    return runner


def _spec(adapter: AdapterId = A, **lora: Any) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=adapter,
        base_model=BASE,
        lora=LoraConfig(**{"rank": 4, "seed": 1, **lora}),
        optimizer=AdamOptimizerConfig(),
    )


def _datum(tokens: list[int], **inputs: Any) -> Datum:
    given = {"target_tokens": [*tokens[1:], 5], **inputs}
    return Datum.received(ModelInput.from_ints(tokens), given)


def _pass(
    work_id: str = "p",
    adapter: AdapterId = A,
    *,
    tokens: list[int] | None = None,
    loss: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    with_gradients: bool = True,
    **inputs: Any,
) -> PassWork:
    tokens = tokens or [1, 2, 3]
    if loss == "cross_entropy":
        inputs.setdefault("weights", [1.0] * len(tokens))
    return PassWork(
        work_id=work_id,
        adapter_id=adapter,
        data=(_datum(tokens, **inputs),),
        loss_fn=loss,
        loss_config=config or {},
        with_gradients=with_gradients,
    )


def _step(work_id: str = "s", adapter: AdapterId = A, params: AdamParams = STEP) -> StepWork:
    return StepWork(work_id=work_id, adapter_id=adapter, params=params)


async def _run(engine: Engine, *works: TrainingWork) -> list[Any]:
    """The results, one after another; all must be good."""
    outcomes = await engine.train(works)
    assert [outcome.work_id for outcome in outcomes] == [work.work_id for work in works]
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.result for outcome in outcomes]


async def _saved(
    engine: Engine,
    folder: Path,
    name: str,
    adapter: AdapterId = A,
    parts: AdapterParts = AdapterParts.SNAPSHOT,
) -> dict[str, bytes]:
    """An adapter's arrays as files."""
    place = folder / name
    place.mkdir()
    await engine.save_adapter(adapter, place, parts)
    return {file.name: file.read_bytes() for file in place.glob("*.safetensors")}


def _work(work_id: str = "w", weights: str | None = None, **fields: Any) -> SampleWork:
    names = SamplingParams.__struct_fields__
    params = {name: fields.pop(name) for name in names if name in fields}
    is_streamed, owner = fields.pop("is_streamed", False), fields.pop("owner", "")
    request = SampleRequest(
        prompt=ModelInput.from_ints(fields.pop("prompt", [1, 2, 3])),
        sampling_params=SamplingParams(**{"max_tokens": 8, "seed": 7, "stop": [], **params}),
        **fields,
    )
    return SampleWork(
        work_id=work_id,
        base_model=BASE,
        weights_id=None if weights is None else WeightsId(weights),
        request=request,
        is_streamed=is_streamed,
        owner=owner,
    )


async def _sample(engine: Engine, *works: SampleWork) -> dict[str, SampleResponse]:
    for work in works:
        engine.admit(work)
    found: dict[str, SampleResponse] = {}
    while len(found) < len(works):
        for event in await engine.step_sampler():
            if isinstance(event, SampleOutcome):
                assert event.result is not None, event.error
                assert event.work_id not in found
                found[event.work_id] = event.result
    return found


# Models


def test_an_engine_lists_its_models_with_their_aliases(run: Callable[[Test], None]) -> None:
    """Every name that a client may ask for, and which are the same model."""

    async def test(engine: Engine, _: Path) -> None:
        models = {model.name: model for model in engine.base_models()}

        assert list(models) == [BASE, "test/alias", "test/other"]
        assert models["test/alias"].alias_of == BASE
        assert models[BASE].alias_of is models["test/other"].alias_of is None
        assert models[BASE].tokenizer_id == "path"

    run(test)


def test_capacity_counts_created_and_dropped_adapters(run: Callable[[Test], None]) -> None:
    """What is made and dropped shows in the capacity; dropping twice is no error."""

    async def test(engine: Engine, _: Path) -> None:
        before = engine.capacity().adapters
        await engine.create_adapter(_spec())
        made = engine.capacity().adapters, engine.has_adapter(A)
        await engine.drop_adapter(A)
        await engine.drop_adapter(A)

        assert made == (before + 1, True)
        assert (engine.capacity().adapters, engine.has_adapter(A)) == (before, False)

    run(test)


@pytest.mark.parametrize(
    "spec",
    [
        AdapterSpec(
            adapter_id=A,
            base_model="nobody/nothing",
            lora=LoraConfig(rank=4),
            optimizer=AdamOptimizerConfig(),
        ),
        _spec(rank=0),
        _spec(rank=10**6),
        _spec(train_attn=False, train_mlp=False, train_unembed=False),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_rejected(
    run: Callable[[Test], None], spec: AdapterSpec
) -> None:
    """As something that the user can mend."""

    async def test(engine: Engine, _: Path) -> None:
        with pytest.raises((NotFoundError, ValidationError)):
            await engine.create_adapter(spec)
        assert not engine.has_adapter(A)

    run(test)


def test_initial_weights_are_determined_by_the_seed_or_the_adapter_id(
    run: Callable[[Test], None],
) -> None:
    """A replay makes the same; another seed or id makes others."""

    async def test(engine: Engine, folder: Path) -> None:
        found = []
        for name, spec in enumerate(
            [_spec(A, seed=5), _spec(B, seed=5), _spec(A, seed=6), _spec(A, seed=None)] * 2
        ):
            await engine.create_adapter(spec)
            found.append(
                await _saved(engine, folder, str(name), spec.adapter_id, AdapterParts.WEIGHTS)
            )
            await engine.drop_adapter(spec.adapter_id)

        assert found[:4] == found[4:]
        assert found[0] == found[1]
        assert found[0] != found[2] != found[3]

    run(test)


# Training


def test_training_lowers_the_loss(run: Callable[[Test], None]) -> None:
    """Gradients flow to the weights, and steps follow them."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        losses = []
        for _round in range(5):
            passed, _stepped = await _run(engine, _pass(), _step())
            losses.append(passed.metrics["loss:sum"])

        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] - 0.1

    run(test)


def test_our_own_metrics_never_overwrite_a_column_of_a_training_loop(
    run: Callable[[Test], None],
) -> None:
    """Loops merge them into their own record, which has a `step` and a `learning_rate`."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        passed, stepped = await _run(engine, _pass(), _step())

        assert stepped.metrics
        for name in {**passed.metrics, **stepped.metrics}.keys() - {"loss:sum"}:
            assert name.startswith("tinsmith/"), name

    run(test)


def test_the_reported_loss_matches_the_returned_logprobs(run: Callable[[Test], None]) -> None:
    """Cross-entropy is exactly the weighted sum; clients rely on it for losses of their own."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        [result] = await _run(engine, _pass(weights=[0.5, 0.0, 2.0]))
        lp = result.loss_fn_outputs[0]["logprobs"].tolist()

        expected = -(0.5 * lp[0] + 2.0 * lp[2])
        assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
        assert all(logprob < 0 for logprob in lp)

    run(test)


SAMPLED: dict[str, Any] = {"logprobs": [-1.0, -12.0, -11.5], "advantages": [1.0, -2.0, 0.5]}


def _expected(loss: str, lp: list[float]) -> float:
    """Each loss by its formula."""
    total = 0.0
    for p, q, a in zip(lp, SAMPLED["logprobs"], SAMPLED["advantages"], strict=True):
        r = math.exp(p - q)
        total += {
            "importance_sampling": -r * a,
            "ppo": -min(r * a, min(max(r, 0.8), 1.2) * a),
            "cispo": -min(max(r, 0.0), 4.0) * p * a,
            "dro": -(p * a - 0.5 * 0.1 * (p - q) ** 2),
        }[loss]
    return total


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_match_their_formulas(run: Callable[[Test], None], loss: str) -> None:
    """As the API documents them."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        config: dict[str, float | str] = {"beta": 0.1} if loss == "dro" else {}
        [result] = await _run(engine, _pass(loss=loss, config=config, **SAMPLED))
        lp = result.loss_fn_outputs[0]["logprobs"].tolist()

        assert result.metrics["loss:sum"] == pytest.approx(_expected(loss, lp), rel=1e-5)

    run(test)


@pytest.mark.parametrize(
    "loss",
    ["cross_entropy", "importance_sampling", "ppo", "dro", "gspo", "stable_reinforce"],
)
def test_a_small_step_along_the_gradient_lowers_each_loss(
    run: Callable[[Test], None], loss: str
) -> None:
    """What is differentiated is what is reported."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        inputs: dict[str, Any] = {} if loss == "cross_entropy" else {**SAMPLED}
        if inputs:
            # Sampled by the model itself, so that no ratio is clipped.
            [given] = await _run(engine, _pass(with_gradients=False))
            inputs["logprobs"] = given.loss_fn_outputs[0]["logprobs"].tolist()
        params = AdamParams(learning_rate=1e-4)
        work = _pass(loss=loss, **inputs)
        before, _stepped, after = await _run(engine, work, _step(params=params), work)

        assert after.metrics["loss:sum"] < before.metrics["loss:sum"]

    run(test)


def test_cispo_does_not_differentiate_its_ratio(run: Callable[[Test], None]) -> None:
    """Where the ratio is 1 it steps as cross-entropy does with the advantages for weights."""

    async def test(engine: Engine, _: Path) -> None:
        for adapter in (A, B):
            await engine.create_adapter(_spec(adapter))
        [given] = await _run(engine, _pass(with_gradients=False))
        sampled = given.loss_fn_outputs[0]["logprobs"].tolist()
        advantages = SAMPLED["advantages"]
        cispo = _pass(loss="cispo", logprobs=sampled, advantages=advantages)
        plain = _pass("q", B, weights=advantages)
        await _run(engine, cispo, _step(), plain, _step("t", B))
        left, right = await _run(
            engine, _pass(with_gradients=False), _pass("q", B, with_gradients=False)
        )

        assert left.metrics["loss:sum"] == pytest.approx(right.metrics["loss:sum"], rel=1e-5)

    run(test)


def test_a_forward_backward_split_in_two_gives_the_same_step(run: Callable[[Test], None]) -> None:
    """Gradients add up until the step, and losses are sums."""

    async def test(engine: Engine, _: Path) -> None:
        for adapter in (A, B):
            await engine.create_adapter(_spec(adapter))
        one, two = _pass().data[0], _pass(tokens=[9, 8, 7]).data[0]
        whole = PassWork(work_id="w", adapter_id=A, data=(one, two), loss_fn="cross_entropy")
        await _run(engine, whole, _step())
        await _run(engine, _pass("1", B), _pass("2", B, tokens=[9, 8, 7]), _step("3", B))
        first, second = await _run(
            engine, _pass(with_gradients=False), _pass("q", B, with_gradients=False)
        )

        assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-4)

    run(test)


def test_a_forward_pass_without_gradients_changes_nothing(run: Callable[[Test], None]) -> None:
    """Not even what was gathered before."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await _run(engine, _pass())
        before = await _saved(engine, folder, "before")
        await _run(engine, _pass(tokens=[7, 7, 7], with_gradients=False))

        assert await _saved(engine, folder, "after") == before

    run(test)


def test_results_do_not_depend_on_what_else_is_in_the_batch(run: Callable[[Test], None]) -> None:
    """Nor on how works are split into batches; bit for bit."""

    async def test(engine: Engine, folder: Path) -> None:
        works: list[TrainingWork] = [
            _pass(),
            _pass("2", tokens=[4, 5]),
            _step("3"),
            _pass("4"),
            _step("5"),
        ]
        await engine.create_adapter(_spec(A))
        alone = [(await _run(engine, work))[0] for work in works]
        first = await _saved(engine, folder, "alone")
        await engine.create_adapter(_spec(A))
        await engine.create_adapter(_spec(B, seed=9, rank=8))
        others = [_pass(f"o{n}", B, tokens=[n + 1, 3]) for n in range(5)]
        mixed: list[TrainingWork] = [
            work for pair in zip(works, others, strict=True) for work in pair
        ]
        together = (await _run(engine, *mixed))[::2]
        second = await _saved(engine, folder, "together")

        assert [one.metrics for one in alone] == [one.metrics for one in together]
        assert first == second

    run(test)


@pytest.mark.parametrize(
    "wrong",
    [
        _pass("x", loss="unheard_of"),
        _pass("x", loss="ppo"),
        _pass("x", weights=[math.nan] * 3),
        _pass("x", weights=[1.0, math.inf, 1.0]),
        _pass("x", weights=[1.0]),
        _pass("x", AdapterId("nobody")),
        PassWork(
            work_id="x", adapter_id=A, data=(_datum([1, 2], target_tokens=[1]),), loss_fn="dro"
        ),
        StepWork(work_id="x", adapter_id=AdapterId("nobody"), params=STEP),
    ],
)
def test_a_failed_work_item_changes_nothing_and_does_not_affect_others(
    run: Callable[[Test], None], wrong: TrainingWork
) -> None:
    """As something that the user can mend; its neighbours are done."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await engine.create_adapter(_spec(B))
        good, good_too = _pass("1"), _pass("2", tokens=[3, 2, 1])
        await _run(engine, good, good_too, *[_pass("1", B), _pass("2", B, tokens=[3, 2, 1])])
        await engine.create_adapter(_spec())

        first, failed, last = await engine.train([good, wrong, good_too])

        assert isinstance(failed.error, TinkerError), failed
        assert first.error is None and last.error is None
        left, right = await _saved(engine, folder, "a"), await _saved(engine, folder, "b", B)
        assert left == right

    run(test)


def test_targets_may_have_several_columns_and_be_sparse(run: Callable[[Test], None]) -> None:
    """Each cell has a logprob; those with no weight do not count."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        dense = _pass(
            target_tokens=[[2, 0], [3, 4]], weights=[[1.0, 0.0], [1.0, 2.0]], tokens=[1, 2]
        )
        rows = {"sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [0, 0, 1]}
        sparse = _pass(
            target_tokens=TensorData([2, 3, 4], "int64", [2, 2], **rows),
            weights=TensorData([1.0, 1.0, 2.0], "float32", [2, 2], **rows),
            tokens=[1, 2],
        )
        first, second = await _run(engine, dense, sparse)

        assert first.loss_fn_outputs[0]["logprobs"].shape == [2, 2]
        assert first.metrics["loss:sum"] == second.metrics["loss:sum"]

    run(test)


# Files


def test_an_adapter_resumes_from_its_snapshot_bit_for_bit(
    run: Callable[[Test], None],
) -> None:
    """Weights, moments, steps and gathered gradients; bit for bit."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await _run(engine, _pass(), _step(), _pass("2", tokens=[6, 7]))
        await _saved(engine, folder, "snapshot")
        rest = (_step("3"), _pass("4"), _step("5"))
        await _run(engine, *rest)
        straight = await _saved(engine, folder, "straight")

        await engine.load_adapter(_spec(), folder / "snapshot", AdapterParts.SNAPSHOT)
        await _run(engine, *rest)

        assert await _saved(engine, folder, "again") == straight

    run(test)


def test_loading_weights_alone_resets_gradients_and_optimizer_state(
    run: Callable[[Test], None],
) -> None:
    """Weights alone: no moments, no gradients, and the first step is step 1."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await _run(engine, _pass(), _step(), _pass("2"))
        await _saved(engine, folder, "whole")
        await _saved(engine, folder, "weights", parts=AdapterParts.WEIGHTS)
        await engine.load_adapter(_spec(A), folder / "whole", AdapterParts.WEIGHTS)
        await engine.load_adapter(_spec(B), folder / "weights", AdapterParts.WEIGHTS)
        works: list[TrainingWork] = [_pass("1"), _step("2"), _pass("1", B), _step("2", B)]
        await _run(engine, *works)

        assert await _saved(engine, folder, "a") == await _saved(engine, folder, "b", B)
        with pytest.raises(ValidationError):
            await engine.load_adapter(_spec(), folder / "weights", AdapterParts.CHECKPOINT)

    run(test)


def test_files_that_do_not_match_the_adapter_are_rejected_and_change_nothing(
    run: Callable[[Test], None],
) -> None:
    """Another rank, another base model, no files at all."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        before = await _saved(engine, folder, "before")
        await engine.create_adapter(_spec(B, rank=8))
        await _saved(engine, folder, "rank", B)
        other = AdapterSpec(
            adapter_id=B,
            base_model="test/other",
            lora=LoraConfig(rank=4),
            optimizer=AdamOptimizerConfig(),
        )
        await engine.create_adapter(other)
        await _saved(engine, folder, "base", B)
        (folder / "empty").mkdir()

        for name in ("rank", "base", "empty"):
            with pytest.raises(ValidationError):
                await engine.load_adapter(_spec(), folder / name, AdapterParts.WEIGHTS)
        with pytest.raises(ValidationError):
            await engine.load_weights(WeightsId("w"), BASE, folder / "base")

        assert await _saved(engine, folder, "after") == before
        assert not engine.has_weights(WeightsId("w"))

    run(test)


# Sampling


def test_a_seeded_sample_does_not_depend_on_what_else_is_in_the_batch(
    run: Callable[[Test], None],
) -> None:
    """Alone or among others, first or last: the same tokens and logprobs."""

    async def test(engine: Engine, _: Path) -> None:
        alone = (await _sample(engine, _work("alone", num_samples=2)))["alone"]
        others = [_work(f"o{n}", prompt=[n, 4], seed=n, max_tokens=3 + n) for n in range(6)]
        among = (await _sample(engine, *others[:3], _work("it", num_samples=2), *others[3:]))["it"]
        unseeded = await _sample(engine, _work("x", seed=None), _work("y", seed=None))

        for left, right in zip(alone.sequences, among.sequences, strict=True):
            assert left.tokens == right.tokens
            assert left.logprobs == right.logprobs
        assert alone.sequences[0].tokens != alone.sequences[1].tokens
        assert unseeded["x"].sequences[0].tokens != unseeded["y"].sequences[0].tokens

    run(test)


def test_sampled_logprobs_equal_training_logprobs(run: Callable[[Test], None]) -> None:
    """Sampling and training see the same model."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await _run(engine, _pass(), _step())
        await _saved(engine, folder, "weights", parts=AdapterParts.WEIGHTS)
        await engine.load_weights(WeightsId("w"), BASE, folder / "weights")
        await engine.load_weights(WeightsId("w"), BASE, folder / "weights")
        found = await _sample(engine, _work(weights="w", prompt_logprobs=True))
        [sequence] = found["w"].sequences
        tokens = [1, 2, 3, *sequence.tokens]
        [passed] = await _run(engine, _pass(tokens=tokens, with_gradients=False))
        trained = passed.loss_fn_outputs[0]["logprobs"].tolist()

        assert sequence.logprobs == pytest.approx(trained[2:-1], abs=1e-5)
        assert found["w"].prompt_logprobs is not None
        assert found["w"].prompt_logprobs[0] is None
        assert found["w"].prompt_logprobs[1:] == pytest.approx(trained[:2], abs=1e-5)

    run(test)


def test_a_sample_ends_at_its_token_limit_or_its_stop_sequence(run: Callable[[Test], None]) -> None:
    """A stop is the last token; without stops it runs to the end."""

    async def test(engine: Engine, _: Path) -> None:
        free = (await _sample(engine, _work("free", max_tokens=20)))["free"].sequences[0]
        stop = free.tokens[4]
        until = (await _sample(engine, _work("until", max_tokens=20, stop=[stop])))["until"]

        assert (free.stop_reason, len(free.tokens)) == ("length", 20)
        assert until.sequences[0].stop_reason == "stop"
        assert until.sequences[0].tokens == free.tokens[: free.tokens.index(stop) + 1]

    run(test)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_that_exclude_every_ratio_fail_the_forward_backward(
    loss: str, run: Callable[[Test], None]
) -> None:
    async def test(engine: Engine, _: Path) -> None:
        await engine.create_adapter(_spec())
        work = _pass(
            loss=loss,
            config={"clip_low_threshold": 5.0},
            logprobs=[-1.0] * 3,
            advantages=[1.0] * 3,
        )

        [outcome] = await engine.train([work])

        assert "clip_low_threshold is 5" in str(outcome.error)

    run(test)


def test_a_prompt_may_fill_the_context(run: Callable[[Test], None]) -> None:
    """What was sampled to the end of the context can be asked about, as all else that was."""

    async def test(engine: Engine, _: Path) -> None:
        [base] = [model for model in engine.base_models() if model.name == BASE]
        prompt = [1 + n % 200 for n in range(base.max_context)]
        works = [_work(f"{most}", prompt=prompt, max_tokens=most) for most in (1, None)]

        found = await _sample(engine, *works)

        tokens = [sample.sequences[0].tokens for sample in found.values()]
        assert len(tokens[0]) == 1
        assert tokens[0] == tokens[1]

    run(test)


def test_the_eos_token_is_a_stop_unless_stops_are_given(
    run: Callable[[Test], None],
) -> None:
    """No stop means the model's own end."""

    async def test(engine: Engine, _: Path) -> None:
        [model] = [one for one in engine.base_models() if one.name == BASE]
        work = _work(num_samples=32, stop=None, max_tokens=60)
        sequences = (await _sample(engine, work))["w"].sequences
        for sequence in sequences:
            ends = [token in model.eos_tokens for token in sequence.tokens]
            assert ends[-1] == (sequence.stop_reason == "stop")
            assert not any(ends[:-1])
        assert {one.stop_reason for one in sequences} == {"stop", "length"}

    run(test)


def test_temperature_zero_top_k_one_and_a_tiny_top_p_are_greedy(
    run: Callable[[Test], None],
) -> None:
    """At 0, with one token or with next to no mass, the likeliest token is drawn."""

    async def test(engine: Engine, _: Path) -> None:
        works = [
            _work("cold", temperature=0.0, topk_sample_logprobs=2),
            _work("one", top_k=1, seed=1),
            _work("mass", top_p=1e-6, seed=2),
        ]
        found = {name: r.sequences[0] for name, r in (await _sample(engine, *works)).items()}
        rows = found["cold"].topk_logprobs
        assert rows is not None

        assert found["cold"].tokens == found["one"].tokens == found["mass"].tokens
        assert [row[0][0] for row in rows if row is not None] == found["cold"].tokens
        assert all(row is not None and row[0][1] >= row[1][1] for row in rows)

    run(test)


def test_every_kind_of_prompt_logprobs_is_returned(run: Callable[[Test], None]) -> None:
    """Logprobs of the last positions, of the likeliest, of given tokens, and of drawn ones."""

    async def test(engine: Engine, _: Path) -> None:
        prompt = [1, 2, 3, 4]
        dense = TensorData([[2, -1], [3, 9], [4, 8]], "int64")
        rows = {"sparse_crow_indices": [0, 1, 2, 3], "sparse_col_indices": [0, 0, 0]}
        sparse = TensorData([2, 3, 4], "int64", [3, 2], **rows)
        asked: dict[str, Any] = {"prompt": prompt, "prompt_logprobs": True}
        found = await _sample(
            engine,
            _work("all", **asked, topk_prompt_logprobs=3, target_prompt_logprobs=dense),
            _work("last", **asked, prompt_logprobs_last_n=2, target_prompt_logprobs=sparse),
            _work("alt", prompt=prompt, prompt_alt_tokens_k=5),
        )
        whole, last = found["all"].prompt_logprobs, found["last"].prompt_logprobs
        targets, cells = found["all"].target_prompt_logprobs, found["last"].target_prompt_logprobs
        best, alt = found["all"].topk_prompt_logprobs, found["alt"].prompt_alt_tokens
        assert whole and last and targets and cells and best and alt

        assert last == [None, None, *whole[2:]]
        assert [row[0] for row in targets.tolist()] == whole[1:]
        assert targets.tolist()[0][1] == 0.0
        assert cells.is_sparse and cells.data == whole[1:]
        assert best[0] is None and all(len(row or []) == 3 for row in list(best)[1:])
        assert alt.tokens.shape == alt.logprobs.shape == [3, 5]
        assert found["alt"].prompt_logprobs is None

    run(test)


def _slow_loss() -> CustomLossSpec:
    """A loss that computes for a hundred times as long as a small pass."""

    def loss(logprobs: Any) -> Any:
        x = logprobs[:, None] * logprobs[None, :]
        for _ in range(60):
            x = x.tanh()
        return x.sum(), {}

    traced = trace(loss, {"logprobs": 1})
    return CustomLossSpec(loss_id="l", inputs=tuple(traced.inputs), graph=traced.graph)


@pytest.mark.parametrize("make", ["embedded"], indirect=True)
def test_an_uploaded_loss_does_not_delay_other_adapters(run: Callable[[Test], None]) -> None:
    """It is called first and ends last; calls about its own adapter keep their order."""

    async def test(engine: Engine, folder: Path) -> None:
        tokens = [1 + n % 200 for n in range(400)]
        datum = _datum(tokens)
        slow = PassWork(
            work_id="slow",
            adapter_id=A,
            data=(datum,) * 6,
            loss_fn="custom",
            custom_loss=_slow_loss(),
        )
        for adapter in (A, B):
            await engine.create_adapter(_spec(adapter))
        await _run(engine, slow)  # what is loaded on first use is there
        await _run(engine, _step())
        ended: list[str] = []

        async def call(name: str, *works: TrainingWork) -> None:
            await _run(engine, *works)
            ended.append(name)

        calls = [
            call("slow", slow),
            call("step behind it", _step()),
            *(call("other", _pass(f"p{n}", B), _step(f"s{n}", B)) for n in range(3)),
        ]
        await asyncio.gather(*calls)
        beside = [await _saved(engine, folder, f"beside {one}", one) for one in (A, B)]

        assert ended == ["other"] * 3 + ["slow", "step behind it"]
        for adapter in (A, B):
            await engine.create_adapter(_spec(adapter))
        for works in [(slow, _step())] * 2 + [(_pass(adapter=B), _step(adapter=B))] * 3:
            await _run(engine, *works)
        alone = [await _saved(engine, folder, f"alone {one}", one) for one in (A, B)]
        assert alone == beside

    run(test)


def test_streamed_tokens_equal_those_of_the_result(run: Callable[[Test], None]) -> None:
    """They come in order, before the outcome; others get none."""

    async def test(engine: Engine, _: Path) -> None:
        engine.admit(_work("it", num_samples=2, max_tokens=30, is_streamed=True))
        engine.admit(_work("quiet", max_tokens=30))
        told: dict[int, list[int]] = {0: [], 1: []}
        ended: dict[str, SampleResponse] = {}
        steps = 0
        while len(ended) < 2:
            steps += 1
            for event in await engine.step_sampler():
                if isinstance(event, SampleTokens):
                    assert event.work_id == "it" and "it" not in ended
                    assert len(event.tokens) == len(event.logprobs)
                    told[event.sequence] += event.tokens
                elif event.result is not None:
                    ended[event.work_id] = event.result

        assert steps > 1
        assert [told[0], told[1]] == [one.tokens for one in ended["it"].sequences]

    run(test)


def test_an_owner_s_single_sample_is_not_starved_by_many_of_another_owner(
    run: Callable[[Test], None],
) -> None:
    """Its tokens come within a few steps, which a sample of the other on its replica counts."""

    async def test(engine: Engine, _: Path) -> None:
        many = [_work(f"a{n}", max_tokens=400, owner="a", seed=n) for n in range(700)]
        first_on: dict[str, str] = {}
        for work in many:
            is_first = first_on.setdefault(engine.replica_for(work), work.work_id) == work.work_id
            engine.admit(msgspec.structs.replace(work, is_streamed=is_first))
        steps: Counter[str] = Counter()
        while min(steps[one] for one in first_on.values()) < 3:
            steps.update(event.work_id for event in await engine.step_sampler())
        single = _work("b", max_tokens=16, owner="b", is_streamed=True)
        beside = first_on[engine.replica_for(single)]
        engine.admit(single)
        steps.clear()
        before_first: int | None = None
        result: SampleResponse | None = None
        while result is None:
            for event in await engine.step_sampler():
                steps[event.work_id] += 1
                if event.work_id == "b" and before_first is None:
                    before_first = steps[beside]
                if event.work_id == "b" and isinstance(event, SampleOutcome):
                    result = event.result
                    assert result is not None, event.error
        for work in many:
            engine.cancel(work.work_id)

        # Some more than it takes: what the engine told of meanwhile is on its way here.
        assert before_first is not None and before_first <= 30
        assert steps[beside] <= 60
        alone = await _sample(engine, _work("b", max_tokens=16, owner="b"))
        assert alone["b"].sequences == result.sequences

    run(test)


def test_a_cancelled_sample_has_no_outcome(run: Callable[[Test], None]) -> None:
    """It leaves at once; unknown ids are ignored, and the same id twice is one sample."""

    async def test(engine: Engine, _: Path) -> None:
        engine.admit(_work("it", max_tokens=100_000))
        engine.admit(_work("it", max_tokens=100_000))
        engine.cancel("nobody")
        assert engine.capacity().samples == 1
        await engine.step_sampler()
        engine.cancel("it")
        events = await engine.step_sampler()

        assert events == []
        assert engine.capacity().samples == 0

    run(test)


def test_dropped_weights_still_serve_the_samples_that_use_them(run: Callable[[Test], None]) -> None:
    """They go when the last sample of them has ended; dropping nothing is no error."""

    async def test(engine: Engine, folder: Path) -> None:
        await engine.create_adapter(_spec())
        await _saved(engine, folder, "weights", parts=AdapterParts.WEIGHTS)
        weights = WeightsId("w")
        await engine.load_weights(weights, BASE, folder / "weights")
        engine.admit(_work("it", weights="w", max_tokens=30))
        await engine.drop_weights(weights)
        await engine.drop_weights(WeightsId("nothing"))
        assert not engine.has_weights(weights)
        found = await _sample(engine, _work("it", weights="w", max_tokens=30))

        assert len(found["it"].sequences[0].tokens) == 30

    run(test)


def test_calls_on_a_closed_engine_say_that_it_is_closed(run: Callable[[Test], None]) -> None:
    """And may be closed again."""

    async def test(engine: Engine, _: Path) -> None:
        await engine.close()
        await engine.close()
        with pytest.raises(ClosedError):
            await engine.create_adapter(_spec())

    run(test)
