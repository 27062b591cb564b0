"""Custom losses against the official SDK: the graphs it writes, and the two passes it sends."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.fx
from tinker.lib.public_interfaces import custom_loss as official

from tests.contract.official_custom_loss import (
    BASE_MODEL,
    CASES,
    TOKENS,
    UPLOADED_INPUTS,
    UPLOADED_RANKS,
    cross_entropy,
    inputs,
    whole_batch,
)
from tests.contract.official_process import said_by
from tests.numerics.small_models import make_model
from tinsmith.client.losses.graph import trace
from tinsmith.client.service import ServiceClient
from tinsmith.testing import ScriptedService, running_service
from tinsmith.testing.received import ReceivedRequest
from tinsmith.types import Datum, ModelInput

Loss = Callable[..., Any]
WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


def clipped_ratio(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, max=1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/clipped:mean": (ratio != clipped).to(torch.float32).mean()}


def every_argument(logprobs: Any) -> Any:
    x = logprobs[1:, ...][None].clamp(min=-math.inf, max=math.inf).nan_to_num(nan=math.nan)
    x = x.to(torch.float32).to(torch.device("cpu")).to("cpu", non_blocking=True)
    x = torch.zeros_like(x, layout=torch.strided) + x
    x = x.contiguous(memory_format=torch.contiguous_format)
    x = torch.cat([x.flatten(), logprobs[::2]], dim=0).reshape((1, -1))
    x = x[:, (0, 1)].expand(*(2, 2))
    return x.sum(dim=None), {}


def slices_and_sizes(logprobs: Any, w: Any) -> Any:
    x = logprobs.reshape(torch.Size([1, 3]))[:, : logprobs.shape[0] - 1]
    y = torch.stack([logprobs[i] for i in range(2)]) + w[w.argmax() :].sum()
    return torch.einsum("i,i->", y, y) + x.max(dim=1).values[0], {}


def operators(logprobs: Any, w: Any) -> Any:
    x = abs(-logprobs) + 1 - w * 2 / 3
    x = (x**2 // 2) % 3
    x = torch.where((x > 0) & (w <= 1) | ~(x == 0), x, 2.0)
    x += 1
    x = x @ x.T
    return x.sum() * x.shape[0] * math.exp(1.0), {}


def as_list(logprobs: Any) -> Any:
    return [logprobs.sum(), {}]


def from_namespaces(logprobs: Any) -> Any:
    x = torch.nn.functional.relu(torch.nn.functional.softplus(logprobs))
    y = torch.special.expit(x) + torch.linalg.norm(x) + math.sqrt(2.0)
    return y.sum(dtype=torch.float64) + math.exp(x.sum()), {"custom/x:sum": x.mT.sum()}


def a_lambda() -> Loss:
    return lambda logprobs: (logprobs.logsumexp(0), {})


GOOD = [
    cross_entropy,
    clipped_ratio,
    every_argument,
    slices_and_sizes,
    operators,
    as_list,
    from_namespaces,
    a_lambda(),
]


@pytest.mark.parametrize("fn", GOOD, ids=lambda fn: fn.__name__)
def test_a_graph_is_written_as_the_official_sdk_writes_it(fn: Loss) -> None:
    ranks: Any = dict.fromkeys(inspect.signature(fn).parameters, 1)
    theirs = official.trace_loss(fn, ranks, "s")

    ours = trace(fn, ranks)

    assert msgspec.to_builtins(ours.graph) == official.encode_graph(theirs).model_dump()
    assert ours.name == theirs.name
    assert [(i.name, i.rank) for i in ours.inputs] == [(i.name, i.rank) for i in theirs.inputs]


class _Module(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x


CAPTURED = torch.ones(3)
MODULE = torch.nn.ReLU()


@torch.fx.wrap
def elsewhere(x: Any) -> Any:
    return x


def needs_a_branch(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}


BAD: dict[str, Loss] = {
    "other first parameter": lambda x: (x.sum(), {}),
    "no parameter": lambda: (1, {}),
    "default": lambda logprobs, w=1: (logprobs.sum() * w, {}),
    "star": lambda logprobs, *a: (logprobs.sum() * a[0], {}),
    "keywords": lambda logprobs, **a: (logprobs.sum() * a["a"], {}),
    "keyword only": lambda logprobs, *, a: (logprobs.sum() * a, {}),
    "upper case": lambda logprobs, A: (logprobs.sum() * A, {}),
    "item": lambda logprobs: (logprobs.sum().item(), {}),
    "numpy": lambda logprobs: (logprobs.numpy(), {}),
    "tolist": lambda logprobs: (logprobs.tolist(), {}),
    "backward": lambda logprobs: (logprobs.sum().backward(), {}),
    "captured tensor": lambda logprobs: ((logprobs * CAPTURED).sum(), {}),
    "captured module": lambda logprobs: (MODULE(logprobs).sum(), {}),
    "made module": lambda logprobs: (_Module()(logprobs).sum(), {}),
    "branch": needs_a_branch,
    "range": lambda logprobs: (logprobs[range(2)].sum(), {}),
    "length": lambda logprobs: (logprobs.sum() / len(logprobs), {}),
    "wrapped function": lambda logprobs: (elsewhere(logprobs).sum(), {}),
    "triple": lambda logprobs: (logprobs.sum(), {}, 1),
    "nested metric": lambda logprobs: (logprobs.sum(), {"custom/a:sum": (logprobs.sum(),)}),
    "complex": lambda logprobs: (logprobs.sum() + 1j, {}),
    "no pair": lambda logprobs: logprobs.sum(),
    "no tensor": lambda logprobs: (1.0, {}),  # noqa: ARG005 - it is what the test is about
    "metric name": lambda logprobs: (logprobs.sum(), {"mine": logprobs.sum()}),
    "metric value": lambda logprobs: (logprobs.sum(), {"custom/a:sum": 1.0}),
    "metrics no dict": lambda logprobs: (logprobs.sum(), [logprobs.sum()]),
    "error": lambda logprobs: (logprobs.sum() / (1 // 0), {}),
}


@pytest.mark.parametrize("fn", BAD.values(), ids=BAD)
def test_losses_that_the_official_sdk_rejects_are_rejected(fn: Loss) -> None:
    ranks: Any = dict.fromkeys(inspect.signature(fn).parameters, 1)
    with pytest.raises(ValueError, match=r"create_custom_loss|rank"):
        official.encode_graph(official.trace_loss(fn, ranks, "s"))

    with pytest.raises(ValueError, match="custom loss"):
        trace(fn, ranks)


@pytest.mark.parametrize(
    "ranks", [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1, "other": 1}]
)
def test_wrong_ranks_are_rejected(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"create_custom_loss|rank"):
        official.trace_loss(as_list, ranks, "s")

    with pytest.raises(ValueError, match="as_list"):
        trace(as_list, ranks)


# Both SDKs over the wire


class Run(NamedTuple):
    ours: list[ReceivedRequest]
    theirs: list[ReceivedRequest]
    our_metrics: dict[str, Any]
    their_metrics: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What each of the two SDKs sent for the same calls, on an engine that runs uploaded losses."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    with running_service(
        long_poll_s=0.5,
        custom_loss_server_side=True,
        engine="embedded",
        base_models=[f"{BASE_MODEL}={folder}"],
    ) as service:
        our_metrics = with_ours(service)
        ours = service.requests()
        their_metrics = with_theirs(service)
        return Run(ours, service.requests()[len(ours) :], our_metrics, their_metrics)


def with_ours(service: ScriptedService) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        for case in CASES:
            data = [Datum(ModelInput.from_ints(TOKENS), given) for given in inputs(case)]
            output = training.forward_backward_custom(data, whole_batch).result(WAIT_S)
            metrics[case] = output.metrics
        handle = client.create_custom_loss(cross_entropy, UPLOADED_RANKS).result(WAIT_S)
        datum = Datum(ModelInput.from_ints(TOKENS), UPLOADED_INPUTS)
        output = training.forward_backward_custom([datum], handle).result(WAIT_S)
        metrics["uploaded"] = output.metrics
        output = training.forward([datum], "cross_entropy").result(WAIT_S)
        metrics["built in"] = output.metrics
    return metrics


def with_theirs(service: ScriptedService) -> dict[str, Any]:
    said = said_by(
        *("-m", "tests.contract.official_custom_loss", service.base_url, service.api_key),
        environment={"NO_PROXY": "*"},
    )
    metrics: dict[str, Any] = json.loads(said)
    return metrics


def passes(received: list[ReceivedRequest]) -> list[tuple[Any, ...]]:
    return [
        (
            each.request.forward_backward_input.loss_fn,
            each.request.forward_backward_input.data,
            each.request.forward_only,
            each.request.seq_id,
        )
        for each in received
        if each.endpoint == "forward_backward"
    ]


def test_the_requests_of_a_custom_loss_match_the_official_sdk(run: Run) -> None:
    ours, theirs = passes(run.ours), passes(run.theirs)

    assert len(ours) == len(theirs) == 2 * len(CASES) + 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other


@pytest.mark.parametrize("case", [*CASES, "uploaded", "built in"])
def test_the_metrics_of_a_custom_loss_match_the_official_sdk(run: Run, case: str) -> None:
    assert run.our_metrics[case] == pytest.approx(run.their_metrics[case], rel=1e-6)


def test_a_loss_is_uploaded_as_the_official_sdk_uploads_it(run: Run) -> None:
    ours, theirs = (
        msgspec.to_builtins(each.request)
        for received in (run.ours, run.theirs)
        for each in received
        if each.endpoint == "create_custom_loss"
    )

    assert ours.pop("session_id") != theirs.pop("session_id")
    assert ours == theirs


def test_an_uploaded_loss_is_run_by_the_service_in_one_pass(run: Run) -> None:
    for metrics in (run.our_metrics, run.their_metrics):
        total = metrics["built in"]["loss:sum"]
        assert metrics["uploaded"]["loss:sum"] == pytest.approx(total, rel=1e-5)
        assert metrics["uploaded"]["custom/nll:sum"] == pytest.approx(total, rel=1e-5)
        assert metrics["uploaded"]["custom/mean-lp/a.b_c:mean"] < 0


def test_an_uploaded_loss_is_named_in_the_config(run: Run) -> None:
    for received in (run.ours, run.theirs):
        given = [each for each in received if each.endpoint == "forward_backward"][-2].request
        config = given.forward_backward_input.loss_fn_config
        assert list(config) == ["loss_id"]
