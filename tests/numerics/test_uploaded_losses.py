"""Uploaded losses in training passes: what is written out is what the built-in losses are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.small_models import VOCABULARY, make_model
from tinsmith.client.losses.graph import trace
from tinsmith.engine.base import (
    AdapterId,
    AdapterSpec,
    CustomLossSpec,
    PassWork,
    TrainingOutcome,
)
from tinsmith.engine.embedded.adapter_state import AdapterState, fresh_adapter
from tinsmith.engine.embedded.trainer import Trainer
from tinsmith.engine.model.load_base_model import load_base_model
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import ValidationError
from tinsmith.types import AdamOptimizerConfig, Datum, LoraConfig, ModelInput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path)
    return load_base_model(path, dtype=torch.float32)


def an_adapter(model: Transformer, name: str) -> AdapterState:
    spec = AdapterSpec(
        adapter_id=AdapterId(name),
        base_model="base",
        lora=LoraConfig(rank=4, seed=1),
        optimizer=AdamOptimizerConfig(),
    )
    made = fresh_adapter(spec, model.architecture, "cpu")
    chance = torch.Generator().manual_seed(1)
    made.weights = made.weights + 0.02 * torch.randn(made.layout.size, generator=chance)
    return made


def some_data() -> tuple[Datum, ...]:
    chance = torch.Generator().manual_seed(2)
    data = []
    for length in (5, 17, 9):
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=chance)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": -6 + 0.2 * torch.randn(length, generator=chance),
            "advantages": torch.randn(length, generator=chance),
        }
        data.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs))
    return tuple(data)


def uploaded(fn: Callable[..., Any], *names: str) -> CustomLossSpec:
    traced = trace(fn, dict.fromkeys(("logprobs", *names), 1))
    return CustomLossSpec(loss_id="l", inputs=tuple(traced.inputs), graph=traced.graph)


def a_pass(name: str, loss: str, spec: CustomLossSpec | None = None) -> PassWork:
    data = some_data()
    if loss == "custom":  # the name is taken: it is the first input of every uploaded loss
        data = tuple(
            Datum(
                one.model_input,
                {
                    "target_tokens": one.loss_fn_inputs["target_tokens"],
                    "advantages": one.loss_fn_inputs["advantages"],
                    "old": one.loss_fn_inputs["logprobs"],
                },
            )
            for one in data
        )
    return PassWork(
        work_id=name, adapter_id=AdapterId(name), data=data, loss_fn=loss, custom_loss=spec
    )


def run(
    model: Transformer, *works: PassWork
) -> tuple[dict[str, TrainingOutcome], dict[str, AdapterState]]:
    adapters = {work.adapter_id: an_adapter(model, work.adapter_id) for work in works}
    outcomes = Trainer({"base": model}, pass_bytes=1 << 30).train(list(works), adapters)
    return {one.work_id: one for one in outcomes}, {
        str(name): one for name, one in adapters.items()
    }


def ppo(logprobs: Any, advantages: Any, old: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean()}


def gspo(logprobs: Any, advantages: Any, old: Any) -> Any:
    ratio = torch.exp((logprobs - old).mean())
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(), {}


@pytest.mark.parametrize("fn", [ppo, gspo], ids=lambda fn: fn.__name__)
def test_an_uploaded_loss_trains_like_the_built_in_one(
    model: Transformer, fn: Callable[..., Any]
) -> None:
    spec = uploaded(fn, "advantages", "old")

    outcomes, adapters = run(model, a_pass("a", "custom", spec), a_pass("b", fn.__name__))

    ours, theirs = outcomes["a"].result, outcomes["b"].result
    assert ours is not None and theirs is not None, outcomes
    assert ours.metrics is not None and theirs.metrics is not None
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    if fn is ppo:
        assert ours.metrics["custom/ratio:mean"] == pytest.approx(
            theirs.metrics["tinsmith/ratio:mean"], rel=1e-5
        )
    first, second = adapters["a"].gradients, adapters["b"].gradients
    assert first is not None and second is not None
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5 * float(second.abs().max()))


def test_an_uploaded_loss_that_cannot_be_computed_fails_alone(model: Transformer) -> None:
    def bad(logprobs: Any, advantages: Any) -> Any:
        return (logprobs @ advantages[:2]).sum(), {}

    outcomes, adapters = run(
        model, a_pass("a", "custom", uploaded(bad, "advantages")), a_pass("b", "gspo")
    )

    assert isinstance(outcomes["a"].error, ValidationError)
    assert "matmul" in str(outcomes["a"].error)
    assert adapters["a"].gradients is None
    assert outcomes["b"].error is None and adapters["b"].gradients is not None


def test_a_custom_loss_without_a_graph_is_rejected(model: Transformer) -> None:
    outcomes, _ = run(model, a_pass("a", "custom"))

    assert isinstance(outcomes["a"].error, ValidationError)
