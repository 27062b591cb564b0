"""Uploaded losses: what is kept, what is refused, and that nothing crashes the check."""

from __future__ import annotations

import importlib
import math
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.client.losses.graph import trace
from tinsmith.errors import ValidationError
from tinsmith.service.api.loss_arguments import DEEPEST, MOST_ITEMS
from tinsmith.service.api.loss_graphs import MOST_METRICS, MOST_NODES, check_custom_loss
from tinsmith.types.loss_operations import ATTRIBUTES, FUNCTIONS, METHODS
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

Nodes = list[dict[str, Any]]
REF = {"ref": "logprobs"}


def a_request(nodes: Nodes, inputs: list[tuple[str, Any]] | None = None) -> CreateCustomLossRequest:
    return CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="loss",
        inputs=[CustomLossInput(name=n, rank=r) for n, r in inputs or [("logprobs", 1)]],
        graph=CustomLossGraph(nodes=[msgspec.convert(node, CustomLossNode) for node in nodes]),
    )


def a_placeholder(name: str = "logprobs") -> dict[str, Any]:
    return {"op": "placeholder", "name": name, "target": name}


def a_call(target: str, *args: Any, name: str = "x", **kwargs: Any) -> dict[str, Any]:
    op = "call_function" if "." in target or target == "getattr" else "call_method"
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def an_output(loss: Any, metrics: Any = None) -> dict[str, Any]:
    returned = {"tuple": [loss, {"dict": metrics or {}}]}
    return {"op": "output", "name": "output", "target": "output", "args": [returned]}


def a_graph(*calls: dict[str, Any]) -> Nodes:
    """The calls between an input and an output that returns the last of them, summed."""
    last = {"ref": calls[-1]["name"]}
    total = a_call("sum", last, name="total")
    return [a_placeholder(), *calls, total, an_output({"ref": "total"})]


def refusal(nodes: Nodes, inputs: list[tuple[str, Any]] | None = None) -> str:
    with pytest.raises(ValidationError) as refused:
        check_custom_loss(a_request(nodes, inputs))
    return str(refused.value)


# Honest losses, traced as a client does


def _plain(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


def _ppo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    is_cut = (ratio != clipped).float().mean()
    return loss, {"custom/cut:mean": is_cut, "custom/kl:sum": (old - logprobs).sum()}


def _dpo_like(logprobs: Any, ref: Any, mask: Any) -> Any:
    margin = (logprobs - ref)[mask > 0].sum()
    return -F.logsigmoid(0.1 * margin), {"custom/margin:sum": margin}


def _by_position(logprobs: Any) -> Any:
    length = logprobs.shape[0]
    decay = 0.99 ** torch.arange(length, dtype=torch.float32, device=logprobs.device)
    causal = torch.ones((length, length)).tril()
    smooth = torch.matmul(causal, logprobs.unsqueeze(-1)).squeeze(-1) / math.sqrt(length)
    best = smooth.max(dim=0)
    padded = F.pad(decay, (1, 0))[:-1]
    joined = torch.cat([decay, padded]).reshape(2, -1).sum(0)
    loss = F.huber_loss(logprobs, torch.zeros_like(logprobs)) - (joined * logprobs).sum()
    return loss + best.values, {}


def _with_topk(logprobs: Any, targets: Any) -> Any:
    top, _ = torch.topk(logprobs, 2, dim=-1)
    spread = logprobs.expand(logprobs.size(0), logprobs.size(1)).std(dim=-1)
    kinds = torch.where(targets[..., 0] > 3, spread, torch.full_like(spread, float("-inf")))
    return F.softplus(top).sum() + kinds.clamp(min=-1e9).to(torch.float64).sum(), {}


@pytest.mark.parametrize(
    ("loss", "ranks"),
    [
        (_plain, {"logprobs": 1, "weights": 1}),
        (_ppo, {"logprobs": 1, "old": 1, "advantages": 1}),
        (_dpo_like, {"logprobs": 1, "ref": 1, "mask": 1}),
        (_by_position, {"logprobs": 1}),
        (_with_topk, {"logprobs": 2, "targets": 2}),
    ],
)
def test_typical_losses_are_accepted(loss: Any, ranks: dict[str, int]) -> None:
    traced = trace(loss, ranks)
    request = CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name=traced.name,
        inputs=list(traced.inputs),
        graph=traced.graph,
    )

    check_custom_loss(request)


# The tables


def test_every_allowed_function_exists() -> None:
    found = {
        target: getattr(importlib.import_module(target.rpartition(".")[0]), target.split(".")[-1])
        for target in FUNCTIONS - {"getattr"}
    }

    assert not [target for target, function in found.items() if not callable(function)]


def test_every_allowed_method_and_attribute_exists_on_tensors() -> None:
    named = torch.zeros(2).sort()

    assert not [name for name in METHODS if not callable(getattr(torch.Tensor, name, None))]
    assert not [
        name
        for name in ATTRIBUTES
        if not hasattr(torch.zeros(2, 2), name) and not hasattr(named, name)
    ]


def test_functions_that_sample_write_or_do_io_are_not_allowed() -> None:
    names = {target.rpartition(".")[2] for target in FUNCTIONS} | METHODS

    assert not [name for name in names if name.endswith("_") and name not in ("and_", "or_")]
    assert not names & {"rand", "randn", "bernoulli", "multinomial", "dropout", "normal", "randint"}
    assert not names & {
        "backward",
        "item",
        "tolist",
        "numpy",
        "save",
        "load",
        "apply",
        "map",
        "cuda",
    }
    assert not [name for name in names if name.startswith("__")]


# Structure


def test_the_smallest_loss_is_accepted() -> None:
    check_custom_loss(a_request(a_graph(a_call("torch.exp", REF))))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (a_call("torch.save", REF), "not supported"),
        (a_call("os.system", "true"), "not supported"),
        (a_call("builtins.eval", "1"), "not supported"),
        (a_call("torch.nn.functional.dropout", REF), "not supported"),
        (a_call("backward", REF), "not supported"),
        (a_call("mul_", REF, 2), "without the underscore"),
        (a_call("getattr", REF, "__class__"), "attribute"),
        (a_call("getattr", REF, "grad_fn"), "attribute"),
        (a_call("getattr", REF, {"ref": "logprobs"}), "attribute"),
        (a_call("exp", {"ref": "later"}), "not an earlier node"),
        (a_call("exp", {"ref": "x"}), "not an earlier node"),
        (a_call("exp", 3.0), "something that is not a tensor"),
        (a_call("torch.add", REF, 1, out=REF), "keyword"),
        (a_call("torch.add", REF, {"device": "meta:evil"}), "unknown argument"),
        (a_call("torch.add", REF, {"dtype": "complex64"}), "unknown argument"),
        (a_call("torch.add", REF, {"module": "os"}), "unknown argument"),
        (a_call("torch.add", REF, {"ref": "logprobs", "tuple": []}), "one key"),
        (a_call("torch.add", REF, "x" * 100), "characters"),
        (a_call("torch.add", REF, 2**70), "63 bits"),
        (a_call("torch.cat", [REF] * (MOST_ITEMS + 1)), "items"),
        ({"op": "get_attr", "name": "x", "target": "weight"}, "op"),
        ({"op": "call_module", "name": "x", "target": "net"}, "op"),
        ({"op": "call_method", "name": "x y", "target": "exp", "args": [REF]}, "name"),
        ({"op": "call_method", "name": "logprobs", "target": "exp", "args": [REF]}, "another"),
    ],
)
def test_disallowed_graphs_are_rejected_with_the_node_and_the_reason(call: Any, why: str) -> None:
    message = refusal(a_graph(call))

    assert why in message
    assert message.startswith("graph.nodes[1] ")


def test_deeply_nested_arguments_are_rejected() -> None:
    deep: Any = 1
    for _ in range(DEEPEST + 1):
        deep = [deep]

    assert "nested" in refusal(a_graph(a_call("torch.tensor", deep)))


def test_the_numbers_of_nodes_and_metrics_are_limited() -> None:
    chain = [a_call("exp", REF, name=f"n{i}") for i in range(MOST_NODES)]
    metrics = {f"custom/m{i}:sum": REF for i in range(MOST_METRICS + 1)}

    assert "entries" in refusal(a_graph(*chain))
    assert "metrics" in refusal([a_placeholder(), an_output(REF, metrics)])


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([("weights", 1)], "first input"),
        ([("logprobs", 0)], "rank 0"),
        ([("logprobs", 1), ("logprobs", 1)], "another input"),
        ([("logprobs", 1), ("Bad", 1)], "inputs[1]"),
        ([("logprobs", 1)] + [(f"w{i}", 1) for i in range(16)], "17 entries"),
    ],
)
def test_declared_inputs_are_validated(inputs: list[tuple[str, Any]], why: str) -> None:
    assert why in refusal(a_graph(a_call("exp", REF)), inputs)


def test_inputs_and_placeholders_must_agree() -> None:
    two: list[tuple[str, Any]] = [("logprobs", 1), ("w", 1)]

    assert "'w'" in refusal([a_placeholder(), an_output(REF)], two)
    assert "was expected" in refusal([a_placeholder("w"), a_placeholder(), an_output(REF)], two)
    assert "no more inputs" in refusal([a_placeholder(), a_placeholder("w"), an_output(REF)])


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (REF, "(loss, metrics)"),
        ({"tuple": [REF]}, "(loss, metrics)"),
        ({"tuple": [1.0, {"dict": {}}]}, "loss as a tensor"),
        ({"tuple": [REF, REF]}, "as a dict"),
        ({"tuple": [REF, {"dict": {"loss:sum": REF}}]}, "metric"),
        ({"tuple": [REF, {"dict": {"custom/a:max": REF}}]}, "metric"),
        ({"tuple": [REF, {"dict": {"custom/a:sum": 1}}]}, "that is not a tensor"),
    ],
)
def test_a_graph_must_return_a_loss_and_named_metrics(returned: Any, why: str) -> None:
    output = {"op": "output", "name": "output", "target": "output", "args": [returned]}

    assert why in refusal([a_placeholder(), output])


def test_the_output_node_must_be_last_and_unique() -> None:
    assert "out of place" in refusal([a_placeholder()])
    assert "out of place" in refusal([a_placeholder(), an_output(REF), an_output(REF)])


# Sizes


SHAPE = a_call("getattr", REF, "shape", name="shape")
LENGTH = a_call("operator.getitem", {"ref": "shape"}, 0, name="length")
T = {"ref": "length"}


@pytest.mark.parametrize(
    "calls",
    [
        [a_call("torch.zeros", 10**6, 10**6)],
        [a_call("torch.zeros", [10**6, 10**6])],
        [a_call("torch.zeros", size={"tuple": [70_000]})],
        [a_call("torch.full", [10**9], 1.0)],
        [a_call("torch.arange", 10**9)],
        [a_call("torch.arange", 0, 1, 1e-12)],
        [a_call("torch.arange", end=10**9)],
        [a_call("torch.eye", 100_000)],
        [a_call("torch.linspace", 0, 1, 10**10)],
        [a_call("torch.linspace", 0, 1, steps=10**10)],
        [a_call("new_zeros", REF, 10**10)],
        [a_call("repeat", REF, 10**6)],
        [a_call("repeat_interleave", REF, REF)],
        [a_call("torch.repeat_interleave", REF, repeats=REF)],
        [a_call("expand", REF, 10**9, -1)],
        [a_call("torch.nn.functional.pad", REF, [10**9, 0])],
        [a_call("torch.nn.functional.pad", REF, [30_000, 0, 30_000, 0])],
        [a_call("torch._C._nn.one_hot", REF, 10**9)],
        [a_call("torch.tensor_split", REF, 10**9)],
        [a_call("math.exp", REF, name="data"), a_call("torch.zeros", {"ref": "data"})],
        [SHAPE, LENGTH, a_call("torch.zeros", T, T, T)],
        [
            SHAPE,
            LENGTH,
            a_call("operator.mul", T, T, name="big"),
            a_call("torch.zeros", {"ref": "big"}),
        ],
        [SHAPE, a_call("operator.mul", {"ref": "shape"}, 10**9)],
        [a_call("operator.mul", [1, 2], 10**9)],
        [a_call("operator.mul", "text", 10**9)],
        [a_call("operator.pow", 10, 10**9)],
        [SHAPE, LENGTH, a_call("operator.pow", T, T)],
    ],
)
def test_a_small_graph_cannot_request_much_memory(calls: list[dict[str, Any]]) -> None:
    """Each of these takes gigabytes, or for ever, if it is run."""
    assert f"graph.nodes[{len(calls)}] 'x'" in refusal(a_graph(*calls))


@pytest.mark.parametrize(
    "grow",
    [
        lambda last: a_call("torch.cat", [last, last]),
        lambda last: a_call("torch.stack", {"tuple": [last, last]}),
        lambda last: a_call("repeat", last, 2),
        lambda last: a_call("torch.tile", last, {"tuple": [2]}),
        lambda last: a_call("torch.outer", last, last),
        lambda last: a_call("torch.diag", last),
        lambda last: a_call("operator.getitem", last, [0] * 60),
        lambda last: a_call("torch.nn.functional.pad", last, [1, 1]),
    ],
)
def test_sizes_that_grow_step_by_step_are_bounded(grow: Any) -> None:
    chain, last = [], REF
    for number in range(40):
        chain.append({**grow(last), "name": f"n{number}"})
        last = {"ref": f"n{number}"}

    assert "times as large" in refusal(a_graph(*chain))


def test_python_integers_cannot_grow_without_bound() -> None:
    chain, last = [SHAPE, LENGTH], T
    for number in range(40):
        chain.append(a_call("operator.mul", last, last, name=f"n{number}"))
        last = {"ref": f"n{number}"}

    assert "bits" in refusal(a_graph(*chain))


def test_a_length_doubled_too_often_is_rejected() -> None:
    chain, last = [SHAPE, LENGTH], T
    for number in range(40):
        chain.append(a_call("operator.add", last, last, name=f"n{number}"))
        last = {"ref": f"n{number}"}

    assert "depends on the data" in refusal(a_graph(*chain, a_call("torch.zeros", last)))


# Anything at all

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ref", "tuple", "dict", "slice", "float", "dtype", "ellipsis", "x"]),
            inner,
            max_size=2,
        )
        | st.just(REF)
        | st.builds(lambda bounds: {"slice": bounds}, st.lists(inner, min_size=3, max_size=3))
        | st.builds(lambda items: {"tuple": items}, st.lists(inner, max_size=3))
    ),
    max_leaves=12,
)
_targets = st.sampled_from(sorted(FUNCTIONS | METHODS)) | st.text(max_size=10)
_node = st.fixed_dictionaries(
    {
        "op": st.sampled_from(
            ["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
        ),
        "name": st.sampled_from(["a", "b", "c", "logprobs"]) | st.text(max_size=4),
        "target": _targets,
        "args": st.lists(_json, max_size=4),
        "kwargs": st.dictionaries(st.text(max_size=6) | st.just("size"), _json, max_size=2),
    }
)


@settings(max_examples=150)
@given(st.lists(_node, max_size=6))
def test_no_graph_crashes_the_check(nodes: Nodes) -> None:
    for graph in (nodes, [a_placeholder(), *nodes, an_output(REF)]):
        try:
            check_custom_loss(a_request(graph))
        except ValidationError:
            continue


@settings(max_examples=150)
@given(_targets, st.lists(_json, max_size=4))
def test_no_arguments_of_a_known_operation_crash_the_check(target: str, args: list[Any]) -> None:
    for first in ([], [REF]):
        try:
            check_custom_loss(a_request(a_graph(a_call(target, *first, *args))))
        except ValidationError:
            continue
