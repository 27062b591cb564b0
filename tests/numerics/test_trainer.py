"""Training passes against the slow, obvious way: `peft`, one by one, each alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.small_models import FAMILIES, VOCABULARY, make_model
from tests.numerics.training_works import (
    LARGE,
    SMALL,
    A,
    B,
    a_datum,
    a_pass,
    an_adapter,
    data_of,
    gradients_of,
    train,
)
from tinsmith.client.losses.graph import trace
from tinsmith.engine.base import (
    AdapterId,
    CustomLossSpec,
    PassWork,
    StepWork,
    TrainingWork,
)
from tinsmith.engine.embedded import micro_batches
from tinsmith.engine.embedded.adapter_state import AdapterState
from tinsmith.engine.embedded.trainer import Trainer
from tinsmith.engine.embedded.training_pass import run_packed_batch
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import NotFoundError, ValidationError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_base_model(folder, dtype=torch.float32)


def _logprobs(result: ForwardBackwardOutput) -> list[np.ndarray[Any, Any]]:
    return [one["logprobs"].to_numpy() for one in result.loss_fn_outputs]


def _is_close(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> bool:
    return float((found - expected).abs().max() / expected.abs().max()) < bound


@pytest.mark.parametrize("parts", ["all", "attn", "mlp", "unembed"])
def test_a_forward_backward_agrees_with_peft(folder: Path, model: Transformer, parts: str) -> None:
    """Log-probabilities and gradients, on the same weights."""
    import peft
    import transformers

    flags: dict[str, Any] = {
        f"train_{name}": parts in ("all", name) for name in ("attn", "mlp", "unembed")
    }
    adapter = an_adapter(model, **flags)
    data = data_of(13, 1, 30)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    factors = adapter.layout.factors(adapter.weights)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=list(factors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of an adapter on a tied layer
        theirs = peft.get_peft_model(plain, config)
    named = dict(theirs.named_modules())
    layers = {name: named[f"base_model.model.{name}"] for name in factors}
    with torch.no_grad():
        for name, (a_RI, b_OR) in factors.items():
            layers[name].lora_A["default"].weight.copy_(a_RI)
            layers[name].lora_B["default"].weight.copy_(b_OR)
    expected = []
    for datum in data:
        tokens = torch.tensor([datum.model_input.to_ints()])
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        lp = theirs(tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (-lp * datum.loss_fn_inputs["weights"].to_torch()).sum().backward()
        expected.append(lp.detach().numpy())

    [result] = train(model, [a_pass(data)], adapter)

    for found, wanted in zip(_logprobs(result), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    for name, (a_RI, b_OR) in adapter.layout.factors(gradients_of(adapter)).items():
        assert _is_close(a_RI, layers[name].lora_A["default"].weight.grad), name
        assert _is_close(b_OR, layers[name].lora_B["default"].weight.grad), name


LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]


@pytest.mark.parametrize("loss", LOSSES)
def test_batched_data_give_the_same_results_as_one_by_one(model: Transformer, loss: str) -> None:
    """In one pack, in many small ones, and datum by datum."""
    data = data_of(3, 40, 1, 17, 90, 2, 33)
    whole, parted, single = (an_adapter(model) for _ in range(3))

    [result] = train(model, [a_pass(data, loss=loss)], whole)
    [cut] = train(model, [a_pass(data, loss=loss)], parted, pass_bytes=SMALL)
    alone = [train(model, [a_pass([one], loss=loss)], single)[0] for one in data]

    for other in (cut, ForwardBackwardOutput("", [one.loss_fn_outputs[0] for one in alone], {})):
        for found, wanted in zip(_logprobs(result), _logprobs(other), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
    losses = [one.metrics["loss:sum"] for one in alone]
    assert result.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5)
    assert cut.metrics == pytest.approx(result.metrics, rel=1e-4)
    assert _is_close(gradients_of(parted), gradients_of(whole))
    assert _is_close(gradients_of(single), gradients_of(whole))


def test_an_uploaded_loss_gives_the_same_results_as_the_built_in_one(model: Transformer) -> None:
    """Here importance sampling, with two data in one pack and a shared prompt."""

    def loss(logprobs: Any, q: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
        return -(torch.exp(logprobs - q) * advantages).sum(), {"custom/n:sum": q.sum() * 0 + 1}

    traced = trace(loss, {"logprobs": 1, "q": 1, "advantages": 1})
    data = [*data_of(5, 30), *_group(40, [3, 6])]
    ours, theirs = an_adapter(model), an_adapter(model)
    work = PassWork(
        work_id="w",
        adapter_id=A,
        data=tuple(
            Datum(one.model_input, {**one.loss_fn_inputs, "q": one.loss_fn_inputs["logprobs"]})
            for one in data
        ),
        loss_fn="custom",
        custom_loss=CustomLossSpec(loss_id="l", inputs=traced.inputs, graph=traced.graph),
    )

    [expected] = train(model, [a_pass(data, loss="importance_sampling")], ours)
    [found] = train(model, [work], theirs)

    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert found.metrics["custom/n:sum"] == 4
    assert _is_close(gradients_of(theirs), gradients_of(ours))


def _group(shared: int, tails: list[int], seed: int = 3) -> list[Datum]:
    chance = np.random.default_rng(seed)
    prompt = chance.integers(0, VOCABULARY, shared)
    return [
        a_datum([*prompt, *chance.integers(0, VOCABULARY, tail)], seed + at)
        for at, tail in enumerate(tails)
    ]


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo"])
def test_a_shared_prompt_gives_the_same_gradients_as_separate_prompts(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Computed once for all, or once for each."""
    data = [*_group(50, [7, 3, 1, 20, 7]), *data_of(9, 80), *_group(64, [5, 0, 5, 12], seed=9)]
    shared, apart = an_adapter(model), an_adapter(model)
    rows: list[int] = []
    _count_rows(monkeypatch, rows)

    [first] = train(model, [a_pass(data, loss=loss)], shared)
    monkeypatch.setattr(micro_batches, "LEAST_SHARED", 1 << 20)
    [second] = train(model, [a_pass(data, loss=loss)], apart)

    assert rows == [50 + 38 + 89 + 64 + 22, 5 * 50 + 38 + 89 + 4 * 64 + 22]
    for found, wanted in zip(_logprobs(first), _logprobs(second), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], abs=1e-4)
    assert _is_close(gradients_of(shared), gradients_of(apart))


def _count_rows(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    def counted(model: Transformer, batch: micro_batches.PackedBatch[Any], **settings: Any) -> None:
        rows.append(batch.rows)
        run_packed_batch(model, batch, **settings)

    monkeypatch.setattr("tinsmith.engine.embedded.trainer.run_packed_batch", counted)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("slice_rows", "threads"), [(1000, 1), (7, 1), (1000, 2)], indirect=["threads"]
)
def test_batched_adapters_give_the_same_results_as_alone(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    """Bit for bit, in one pack, with ranks, layers, losses and lengths mixed.

    Also where the logits of a pass are made in several slices, and with several threads.
    """
    monkeypatch.setattr(model.head, "_slice_rows", slice_rows)
    shapes: list[dict[str, Any]] = [
        {"rank": 4},
        {"rank": 1, "train_unembed": False},
        {"rank": 16, "train_mlp": False},
        {"rank": 8, "train_attn": False},
    ]
    names = [AdapterId(f"m{n}") for n in range(8)]
    works: list[TrainingWork] = []
    for n, name in enumerate(names):
        data = [*data_of(5 + n, 1, 3 * n + 2, seed=n), *_group(40, [n, 4, 2])]
        works += [
            a_pass(data, name, LOSSES[n % len(LOSSES)], f"{name}.0"),
            a_pass(data_of(6, seed=n), name, work_id=f"{name}.1"),
        ]
    rows: list[int] = []
    _count_rows(monkeypatch, rows)

    def adapters() -> list[AdapterState]:
        return [an_adapter(model, name, seed=n, **shapes[n % 4]) for n, name in enumerate(names)]

    together = adapters()
    results = train(model, works, *together)
    batches = len(rows)
    alone = adapters()
    for n, one in enumerate(alone):
        some = slice(2 * n, 2 * n + 2)
        assert results[some] == [train(model, [work], one)[0] for work in works[some]]

    assert batches == 1
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(gradients_of(one), gradients_of(other)), one.spec.adapter_id


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Llama"])
def test_families_share_batches_and_prompts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What holds of Llama in the tests around this one; windows and experts are no matter."""
    # Kernels round the last numbers of a tensor in another way if it has no multiple of 16.
    size = {"shared_expert_intermediate_size": 64} if family == "Qwen2Moe" else {}
    make_model(tmp_path, family, **size)
    model = load_base_model(tmp_path, dtype=torch.float32)
    data = [*_group(40, [3, 9, 1]), *data_of(25, 2)]
    other: list[TrainingWork] = [
        a_pass(data_of(n + 3, seed=n), B, work_id=str(n)) for n in range(3)
    ]
    alone, together, apart = (an_adapter(model) for _ in range(3))

    [first] = train(model, [a_pass(data)], alone)
    found = train(model, [*other[:2], a_pass(data), *other[2:]], together, an_adapter(model, B))
    monkeypatch.setattr(micro_batches, "LEAST_SHARED", 1 << 20)
    [unshared] = train(model, [a_pass(data)], apart)

    assert found[2] == first
    assert torch.equal(gradients_of(together), gradients_of(alone))
    for one, wanted in zip(_logprobs(first), _logprobs(unshared), strict=True):
        assert one == pytest.approx(wanted, abs=1e-5)
    assert _is_close(gradients_of(alone), gradients_of(apart))


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_work_item_within_the_window_is_unaffected_by_one_beyond_it(
    tmp_path: Path, family: str
) -> None:
    """Bit for bit; and prompts are shared by tails of which some reach beyond it."""
    make_model(tmp_path, family, sliding_window=50, hidden_size=96)
    model = load_base_model(tmp_path)
    data = [*_group(36, [3, 30, 3, 3]), *data_of(25, 60, 2)]
    short, long = a_pass(data_of(25, 11, 11, 40, seed=4)), a_pass(data, B, work_id="long")
    alone, together, apart = an_adapter(model), an_adapter(model), an_adapter(model, B)

    [first] = train(model, [short], alone)
    found = train(model, [short, long], together, an_adapter(model, B))
    one_by_one = [train(model, [a_pass([one], B)], apart)[0] for one in data]

    assert found[0] == first
    assert torch.equal(gradients_of(together), gradients_of(alone))
    wanted = [_logprobs(one)[0] for one in one_by_one]
    for logprobs, right in zip(_logprobs(found[1]), wanted, strict=True):
        assert logprobs == pytest.approx(right, abs=1e-5)


def test_one_call_or_several_give_the_same_step(model: Transformer) -> None:
    """Clients send large batches in chunks."""
    data = data_of(12, 30, 7, 25, 3, 18)
    whole, chunked = an_adapter(model), an_adapter(model)
    step = StepWork(work_id="s", adapter_id=A, params=AdamParams(learning_rate=1e-3))
    chunks: list[TrainingWork] = [a_pass(data[n : n + 2], work_id=str(n)) for n in (0, 2, 4)]

    train(model, [a_pass(data), step], whole)
    train(model, [*chunks, step], chunked)

    moved = whole.weights - an_adapter(model).weights
    assert _is_close(chunked.weights - an_adapter(model).weights, moved, 1e-3)
    assert whole.gradients is None and whole.steps == 1


def test_a_long_datum_gives_the_same_results_with_recomputed_activations(
    model: Transformer,
) -> None:
    """Bit for bit: it computes the same again."""
    data = data_of(300)
    plain, saving = an_adapter(model), an_adapter(model)

    [first] = train(model, [a_pass(data)], plain)
    [second] = train(model, [a_pass(data)], saving, pass_bytes=SMALL)

    assert first == second
    assert torch.equal(gradients_of(plain), gradients_of(saving))


def _no_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to …")


def test_passes_whose_batch_runs_out_of_memory_run_alone(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less memory and the same numbers; one that has no room alone fails and nobody else."""
    works: list[TrainingWork] = [
        a_pass(data_of(9)),
        a_pass(data_of(400), B),
        a_pass(data_of(7, 8), B),
    ]
    expected = [an_adapter(model), an_adapter(model, B, rank=8)]
    train(model, [works[0], works[2]], *expected)
    found = [an_adapter(model), an_adapter(model, B, rank=8)]

    def run(
        model: Transformer, batch: micro_batches.PackedBatch[Any], *, recomputes: bool = False
    ) -> None:
        if batch.rows > 300:
            run_packed_batch(model, batch, recomputes=recomputes)
            _no_memory()
        run_packed_batch(model, batch, recomputes=recomputes)

    monkeypatch.setattr("tinsmith.engine.embedded.trainer.run_packed_batch", run)
    trainer = Trainer({"base": model}, pass_bytes=LARGE)
    outcomes = trainer.train(works, {A: found[0], B: found[1]})

    assert outcomes[0].error is None and outcomes[2].error is None
    assert isinstance(outcomes[1].error, ValidationError)
    assert "not enough memory" in str(outcomes[1].error)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(gradients_of(one), gradients_of(other))


def test_many_passes_run_in_several_batches_if_gradient_memory_is_short(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in several goes, with the same numbers."""
    works: list[TrainingWork] = [a_pass(data_of(5 + n, seed=n), work_id=str(n)) for n in range(5)]
    together, parted = an_adapter(model), an_adapter(model)
    expected = train(model, works, together)
    rows: list[int] = []
    _count_rows(monkeypatch, rows)
    most = 2 * parted.weights.nbytes
    monkeypatch.setattr("tinsmith.engine.embedded.trainer.MOST_GRADIENT_BYTES", most)

    found = train(model, works, parted)

    assert rows == [5 + 6, 7 + 8, 9]
    assert found == expected
    assert torch.equal(gradients_of(parted), gradients_of(together))


def _broken(how: str) -> Callable[[AdapterState], PassWork]:
    def infinite(adapter: AdapterState) -> PassWork:
        adapter.weights = adapter.weights * 1e30
        return a_pass(data_of(4, 5), work_id="x")

    def huge(_: AdapterState) -> PassWork:
        weights = np.full(6, 3e38, np.float32)
        [first, second] = data_of(5, 6)
        second = Datum(second.model_input, {**second.loss_fn_inputs, "weights": weights})
        return a_pass([first, second], work_id="x")

    def unknown(_: AdapterState) -> PassWork:
        return a_pass([*data_of(4), a_datum([1, VOCABULARY])], work_id="x")

    return {"infinite": infinite, "huge": huge, "unknown": unknown}[how]


@pytest.mark.parametrize("how", ["infinite", "huge", "unknown"])
def test_non_finite_or_unknown_input_fails_only_its_own_work_item(
    model: Transformer, how: str
) -> None:
    """The adapter stays as it was, the pack's others do not see it, and a reason is given."""
    bad, good, expected = an_adapter(model, B), an_adapter(model), an_adapter(model)
    train(model, [a_pass(data_of(8, 9))], expected)
    gathered = bad.gradients = torch.ones_like(bad.weights)
    work = _broken(how)(bad)
    work = PassWork(work_id=work.work_id, adapter_id=B, data=work.data, loss_fn=work.loss_fn)

    failed, done = Trainer({"base": model}, pass_bytes=LARGE).train(
        [work, a_pass(data_of(8, 9))], {A: good, B: bad}
    )

    assert isinstance(failed.error, ValidationError)
    assert how == "huge" or "datum" in str(failed.error)
    assert bad.gradients is gathered
    assert done.error is None
    assert torch.equal(gradients_of(good), gradients_of(expected))


def test_work_for_an_unknown_adapter_fails_and_empty_work_succeeds(model: Transformer) -> None:
    """The first is not found; the second is done, and adds nothing."""
    nobody = a_pass(data_of(4), AdapterId("nobody"))
    nothing = a_pass([a_datum([], target_tokens=np.zeros(0, np.int64))])

    missing, empty = Trainer({"base": model}, pass_bytes=LARGE).train(
        [nobody, nothing], {A: an_adapter(model)}
    )

    assert isinstance(missing.error, NotFoundError)
    assert isinstance(empty.result, ForwardBackwardOutput)
    assert empty.result.metrics["loss:sum"] == 0
