"""Uploaded losses on the fake engine, beside torch itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.client.losses.graph import trace
from tinsmith.engines.base import CustomLossSpec
from tinsmith.engines.fake.custom_loss import custom_loss
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ModelInput
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

F = torch.nn.functional
Loss = tuple[Any, dict[str, Any]]


def weighted(logprobs: Any, advantages: Any, sampled: Any) -> Loss:
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/count:sum": (ratio > 1).sum()}


def soft(logprobs: Any, advantages: Any, sampled: Any) -> Loss:
    weights = F.softmax(advantages, dim=0)
    gap = (logprobs - sampled.detach()).pow(2)
    loss = (weights * gap).sum() / logprobs.shape[0] + torch.logsumexp(logprobs, 0)
    return loss, {"custom/top:sum": logprobs.max()}


def many(logprobs: Any, advantages: Any, sampled: Any) -> Loss:
    signed = torch.where(advantages > 0, logprobs, -logprobs * 2)
    running = torch.cumsum(signed, 0)[1:]
    mixed = torch.cat([running, F.logsigmoid(logprobs)]).reshape(-1, 1).squeeze(1)
    loss = mixed.sigmoid().mean() + F.mse_loss(logprobs, sampled) * math.exp(-0.5)
    return loss + logprobs.std() + torch.abs(logprobs - 1).sqrt().sum(), {}


def shaped(logprobs: Any, advantages: Any, sampled: Any) -> Loss:
    matrix = logprobs.unsqueeze(0) * sampled.unsqueeze(1)
    loss = matrix.masked_fill(matrix > 1, 0.5).sum(dim=1).mean() - matrix.amax()
    half = logprobs.numel() // 2
    return loss + logprobs[:half].sum() + F.relu(advantages * logprobs).sum(), {}


LP = np.array([-0.5, -1.25, -2.0, -0.125, -3.0])
INPUTS = {
    "advantages": np.array([1.0, -2.0, 0.5, 0.25, 1.5], np.float32),
    "sampled": np.array([-0.75, -1.0, -2.0, -0.5, -1.0], np.float32),
}
RANKS = {"logprobs": 1, "advantages": 1, "sampled": 1}
DATUM = Datum(ModelInput.from_ints([1] * 5), {"target_tokens": [1] * 5, **INPUTS})


def _spec(fn: Callable[..., Loss], ranks: dict[str, int] | None = None) -> CustomLossSpec:
    traced = trace(fn, ranks or RANKS)
    return CustomLossSpec(loss_id="loss", inputs=traced.inputs, graph=traced.graph)


@pytest.mark.parametrize("fn", [weighted, soft, many, shaped])
def test_losses_and_slopes_are_those_of_torch(fn: Callable[..., Loss]) -> None:
    """The same number, the same derivatives, the same metrics."""
    logprobs = torch.tensor(LP, requires_grad=True)
    expected, named = fn(logprobs, *(torch.tensor(one) for one in INPUTS.values()))
    expected.backward()

    loss, slopes, metrics = custom_loss(_spec(fn), LP, DATUM)

    assert logprobs.grad is not None
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    np.testing.assert_allclose(slopes, logprobs.grad.numpy(), rtol=1e-5, atol=1e-9)
    assert metrics == {name: pytest.approx(float(one.detach())) for name, one in named.items()}


def test_a_loss_that_does_not_look_at_the_logprobs_has_no_slope() -> None:
    """It is allowed, and trains nothing."""

    def constant(logprobs: Any, advantages: Any, sampled: Any) -> Loss:  # noqa: ARG001
        return (advantages * sampled).sum(), {}

    _, slopes, _ = custom_loss(_spec(constant), LP, DATUM)

    assert not slopes.any()


def test_what_the_fake_engine_does_not_compute_is_named() -> None:
    """As something that its user can mend."""

    def odd(logprobs: Any) -> Loss:
        return torch.lgamma(-logprobs).sum(), {}

    with pytest.raises(ValidationError, match="lgamma"):
        custom_loss(_spec(odd, {"logprobs": 1}), LP, DATUM)


def test_a_loss_that_is_no_number_is_refused() -> None:
    """A tensor of several is not one."""

    def several(logprobs: Any) -> Loss:
        return logprobs * 2, {}

    with pytest.raises(ValidationError, match="one number"):
        custom_loss(_spec(several, {"logprobs": 1}), LP, DATUM)


def test_a_datum_without_an_input_is_refused() -> None:
    """The message names it."""
    bare = Datum(ModelInput.from_ints([1]), {"target_tokens": [1]})

    with pytest.raises(ValidationError, match="advantages"):
        custom_loss(_spec(weighted), LP[:1], bare)


def _run_hostile(target: str, args: list[Any], tokens: int, more: int = 0) -> None:
    """Run a graph that the tracer would not make: one call, its result doubled so many times."""

    def node(op: str, name: str, target: str, args: list[Any]) -> CustomLossNode:
        return CustomLossNode(op=op, name=name, target=target, args=args, kwargs={})  # type: ignore[arg-type]

    few = {"slice": [0, 4, None]}
    nodes = [node("placeholder", "logprobs", "logprobs", [])]
    nodes += [
        node("call_method", "column", "unsqueeze", [{"ref": "logprobs"}, 1]),
        node("call_method", "row", "unsqueeze", [{"ref": "logprobs"}, 0]),
        node("call_method", "size", "numel", [{"ref": "logprobs"}]),
        node("call_method", "rows", "long", [{"ref": "row"}]),
        node("call_method", "columns", "long", [{"ref": "column"}]),
        node("call_function", "some", "operator.getitem", [{"ref": "logprobs"}, few]),
        node("call_method", "few", "reshape", [{"ref": "some"}, 2, 2]),
        node("call_function", "made0", target, args),
    ]
    for number in range(more):
        doubled = [{"ref": f"made{number}"}, 2]
        nodes.append(node("call_function", f"made{number + 1}", "operator.mul", doubled))
    nodes += [
        node("call_method", "total", "sum", [{"ref": "logprobs"}]),
        node("output", "output", "output", [{"tuple": [{"ref": "total"}, {"dict": {}}]}]),
    ]
    spec = CustomLossSpec(
        loss_id="loss",
        inputs=(CustomLossInput(name="logprobs", rank=1),),
        graph=CustomLossGraph(nodes=nodes),
    )
    datum = Datum(ModelInput.from_ints([1] * tokens), {"target_tokens": [1] * tokens})
    custom_loss(spec, np.zeros(tokens), datum)


PICKS = [{"ref": "rows"}, {"ref": "columns"}]


@pytest.mark.parametrize(
    ("target", "args", "tokens", "more"),
    [
        ("operator.add", [{"ref": "column"}, {"ref": "row"}], 100_000, 0),
        ("operator.getitem", [{"ref": "few"}, {"tuple": PICKS}], 100_000, 0),
        ("operator.add", [{"ref": "column"}, {"ref": "row"}], 2000, 12),
        ("operator.add", [{"ref": "logprobs"}, 1], 100_000, 400),
        ("operator.pow", [{"ref": "size"}, {"ref": "size"}], 100_000, 0),
        ("operator.pow", [10**18, 10**18], 5, 0),
        ("operator.mul", [[0], 10**18], 5, 0),
        ("operator.mod", ["%999999999999d", 1], 5, 0),
        ("operator.mul", [1, 2], 5, 80),
        ("operator.truediv", [1, 0], 5, 0),
        ("math.exp", [10**5], 5, 0),
    ],
)
def test_a_loss_is_stopped_before_it_takes_much_memory_or_time(
    target: str, args: list[Any], tokens: int, more: int
) -> None:
    with pytest.raises(ValidationError, match="the loss"):
        _run_hostile(target, args, tokens, more)


def test_a_loss_may_compare_each_token_with_each_other() -> None:
    _run_hostile("operator.add", [{"ref": "column"}, {"ref": "row"}], 1000, 3)
