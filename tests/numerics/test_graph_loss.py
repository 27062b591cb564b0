"""Uploaded losses: traced by the official SDK and run by us, against torch; and hostile ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tinker.lib.public_interfaces import custom_loss as official
from torch import Tensor

from tests.contract.official_custom_loss import cross_entropy
from tests.contract.test_custom_loss import as_list, clipped_ratio, every_argument
from tinsmith.client.losses.graph import trace
from tinsmith.engine.model import graph_functions
from tinsmith.engine.model.graph_functions import (
    FUNCTION_OF,
    METHOD_OF,
    MOST_NUMBERS,
    TooManyNumbersError,
    check_size,
    largest_result,
    tensors_in,
)
from tinsmith.engine.model.graph_loss import GraphLoss
from tinsmith.errors import ValidationError
from tinsmith.service.api.loss_graphs import check_custom_loss
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

Fn = Callable[..., Any]
SIZES = (3, 7)


def inputs(**given: Any) -> dict[str, TensorData]:
    return Datum(ModelInput.empty(), given).loss_fn_inputs


def some_data(names: list[str], sizes: tuple[int, ...] = SIZES) -> list[dict[str, TensorData]]:
    chance = torch.Generator().manual_seed(1)
    return [
        inputs(
            target_tokens=torch.zeros(size, dtype=torch.int64),
            **{name: torch.randn(size, generator=chance) for name in names},
        )
        for size in sizes
    ]


def some_logprobs(cells: int = sum(SIZES)) -> Tensor:
    return -torch.rand(cells, generator=torch.Generator().manual_seed(2)) - 0.1


# Losses as they are written


def gspo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = (logprobs - old).mean().exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/ratio:mean": ratio, "custom/tokens:sum": torch.ones_like(old).sum()}


def preference(logprobs: Any, w: Any) -> Any:
    chosen, rejected = (logprobs * (w > 0)).sum(), (logprobs * (w <= 0)).sum()
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    return loss, {"custom/margin:mean": (chosen - rejected).detach()}


def every_pair(logprobs: Any, w: Any) -> Any:
    gaps = logprobs[:, None] - w[None, :]
    best = torch.topk(logprobs, 2)
    picked = torch.where(w > 0, logprobs, 0.0).cumsum(0)[logprobs.shape[0] // 2]
    return gaps.square().mean() + best.values.sum() + picked + gaps.T.std(), {}


def from_namespaces(logprobs: Any) -> Any:
    x = torch.nn.functional.relu(torch.nn.functional.softplus(logprobs))
    y = torch.special.expit(x) + torch.linalg.norm(x) + math.sqrt(2.0)
    return y.sum(dtype=torch.float64), {"custom/x:sum": x.sum()}


def by_mask(logprobs: Any, w: Any) -> Any:
    kept = logprobs[w > 0]
    return kept.sum() + torch.masked_select(logprobs, w > 1).sum() + logprobs.sum(), {}


def sizes_and_constants(logprobs: Any) -> Any:
    steps = torch.arange(0, logprobs.shape[0], 1, dtype=torch.float32)
    discount = 0.5 ** steps.repeat_interleave(2)[::2]
    eye = torch.nn.functional.one_hot(steps.long()).float()
    return (discount * logprobs @ eye).sum() / logprobs.numel(), {}


LOSSES: list[Fn] = [
    cross_entropy,
    clipped_ratio,
    every_argument,
    as_list,
    gspo,
    preference,
    every_pair,
    from_namespaces,
    by_mask,
    sizes_and_constants,
]


def officially_traced(fn: Fn) -> tuple[list[CustomLossInput], CustomLossGraph]:
    ranks: Any = dict.fromkeys(inspect.signature(fn).parameters, 1)
    traced = official.trace_loss(fn, ranks, "s")
    graph = msgspec.convert(official.encode_graph(traced).model_dump(), CustomLossGraph)
    declared = [CustomLossInput(name=one.name, rank=one.rank) for one in traced.inputs]
    check_custom_loss(
        CreateCustomLossRequest(
            session_id="s", custom_loss_seq_id=1, name="n", inputs=declared, graph=graph
        )
    )
    return declared, graph


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_a_loss_traced_by_the_official_sdk_matches_torch(fn: Fn) -> None:
    declared, graph = officially_traced(fn)
    names = [one.name for one in declared[1:]]
    data = some_data(names)
    lp = some_logprobs().requires_grad_()
    total: Any = 0.0
    expected: dict[str, float] = {}
    for span, one in zip((slice(0, 3), slice(3, 10)), data, strict=True):
        loss, metrics = fn(lp[span], *(one[name].to_torch() for name in names))
        total = total + loss
        for name, value in metrics.items():
            share = 0.5 if name.endswith(":mean") else 1.0
            expected[name] = expected.get(name, 0.0) + share * value.detach().item()
    [gradients] = torch.autograd.grad(total, lp)

    ours = GraphLoss(declared, graph, data)
    found = torch.cat([ours.datum_gradients(0, lp[:3]), ours.datum_gradients(1, lp[3:])])
    evaluation = ours.evaluate(lp)

    torch.testing.assert_close(found, gradients)
    assert evaluation.loss == pytest.approx(total.detach().item(), rel=1e-6)
    assert evaluation.metrics == pytest.approx(
        {"loss:sum": evaluation.loss, "tinsmith/tokens:sum": 10.0, **expected}, rel=1e-5
    )


@pytest.mark.parametrize("fn", [cross_entropy, gspo], ids=lambda fn: fn.__name__)
def test_a_pass_without_gradients_gives_the_same_loss(fn: Fn) -> None:
    declared, graph = officially_traced(fn)
    data = some_data([one.name for one in declared[1:]])
    lp = some_logprobs()
    with_gradients, without = GraphLoss(declared, graph, data), GraphLoss(declared, graph, data)
    with_gradients.datum_gradients(0, lp[:3])
    with_gradients.datum_gradients(1, lp[3:])

    assert with_gradients.evaluate(lp) == without.evaluate(lp)


def test_targets_with_several_columns_give_a_matrix() -> None:
    traced = trace(lambda logprobs, w: ((logprobs * w[:, None]).sum(), {}), {"logprobs": 2, "w": 1})
    one = inputs(target_tokens=[[1, 2], [3, 4]], w=torch.tensor([1.0, 10.0]))

    loss = GraphLoss(traced.inputs, traced.graph, [one])
    gradients = loss.datum_gradients(0, torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))

    assert gradients.tolist() == [[1.0, 1.0], [10.0, 10.0]]
    assert loss.evaluate(torch.tensor([-1.0, -2.0, -3.0, -4.0])).loss == -73.0


def test_a_loss_cannot_change_the_data() -> None:
    traced = trace(
        lambda logprobs, w: (
            (logprobs * torch.nn.functional.relu(w, inplace=True)).sum(),
            {},
        ),
        {"logprobs": 1, "w": 1},
    )
    one = inputs(target_tokens=[1, 2], w=torch.tensor([-1.0, 2.0]))

    loss = GraphLoss(traced.inputs, traced.graph, [one])
    loss.datum_gradients(0, torch.tensor([-1.0, -1.0]))

    assert one["w"].tolist() == [-1.0, 2.0]


def test_a_loss_traced_on_another_device_runs_on_this_one() -> None:
    graph = a_graph(
        node("on_device", "call_method", "to", REF, {"device": "cuda:0"}),
        node("named", "call_method", "to", {"ref": "on_device"}, "cuda"),
        node("loss", "call_method", "sum", {"ref": "named"}),
    )

    assert run(graph).datum_gradients(0, some_logprobs(2)).tolist() == [1.0, 1.0]


# What does not fit


def test_the_error_names_a_missing_input() -> None:
    declared, graph = officially_traced(cross_entropy)

    with pytest.raises(ValidationError, match="datum 1 has no 'weights'"):
        GraphLoss(declared, graph, [some_data(["weights"])[0], inputs(target_tokens=[1])])


def test_the_error_names_an_input_of_another_rank() -> None:
    declared, graph = officially_traced(cross_entropy)
    flat = inputs(target_tokens=[1, 2], weights=[[1.0, 2.0]])
    wide = inputs(target_tokens=[[1, 2]], weights=[1.0])

    with pytest.raises(ValidationError, match="weights has 2 dimensions"):
        GraphLoss(declared, graph, [flat])
    with pytest.raises(ValidationError, match="takes logprobs with 1"):
        GraphLoss(declared, graph, [wide])


def node(name: str, op: Any, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)


REF = {"ref": "logprobs"}


def a_graph(*nodes: CustomLossNode, returned: Any = None) -> CustomLossGraph:
    """A graph that begins with the log-probabilities and returns the node `loss`."""
    if returned is None:
        returned = {"tuple": [{"ref": "loss"}, {"dict": {}}]}
    return CustomLossGraph(
        nodes=[
            node("logprobs", "placeholder", "logprobs"),
            *nodes,
            node("output", "output", "output", returned),
        ]
    )


def run(graph: CustomLossGraph, cells: int = 2) -> GraphLoss:
    declared = [CustomLossInput(name="logprobs", rank=1)]
    return GraphLoss(declared, graph, some_data([], (cells,)))


@pytest.mark.parametrize(
    ("op", "target", "args"),
    [
        ("call_function", "os.system", ["true"]),
        ("call_function", "torch.load", ["file"]),
        ("call_function", "builtins.eval", ["1"]),
        ("call_function", "operator.attrgetter", ["__class__"]),
        ("call_function", "torch.nn.functional.__builtins__", []),
        ("call_function", "torch.ops.load_library", ["x"]),
        ("call_method", "backward", [REF]),
        ("call_method", "numpy", [REF]),
        ("call_method", "__class__", [REF]),
        ("call_method", "add_", [REF, 1]),
        ("call_method", "sum", ["text"]),
        ("call_module", "linear", [REF]),
        ("get_attr", "weight", []),
        ("call_function", "getattr", [REF, "__class__"]),
        ("call_function", "getattr", [REF, "data"]),
        ("call_function", "getattr", [REF, "values"]),
        ("call_function", "operator.mul", [[1, 2], 3]),
        ("call_function", "operator.add", ["a", "b"]),
        ("call_function", "torch.matmul", [REF, {"tuple": []}]),
        ("call_function", "torch.add", [REF, {"dtype": "complex64"}]),
        ("call_method", "view", [REF, 3, 5]),
    ],
)
def test_disallowed_operations_are_not_run(op: Any, target: str, args: list[Any]) -> None:
    """The server refuses nearly all of it; an engine does so again."""
    loss = run(a_graph(node("loss", op, target, *args)))

    with pytest.raises(ValidationError, match="loss"):
        loss.datum_gradients(0, some_logprobs(2))


def test_an_out_argument_is_rejected() -> None:
    bad = node("loss", "call_function", "torch.exp", REF, out=REF)

    with pytest.raises(ValidationError, match="'out'"):
        run(a_graph(bad)).datum_gradients(0, some_logprobs(2))


LOSS = {"ref": "loss"}


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (LOSS, "must return"),
        ({"tuple": [REF, {"dict": {}}]}, "one element"),
        ({"tuple": [1.0, {"dict": {}}]}, "one element"),
        ({"tuple": [LOSS, {"dict": {"mine": LOSS}}]}, "invalid name 'mine'"),
        ({"tuple": [LOSS, {"dict": {"custom/a:max": LOSS}}]}, "metric"),
        ({"tuple": [LOSS, {"dict": {"custom/a:sum": REF}}]}, "one element"),
        ({"tuple": [LOSS, {"dict": {"custom/a:sum": 1.0}}]}, "one element"),
    ],
)
def test_a_loss_returns_one_number_and_metrics(returned: Any, match: str) -> None:
    graph = a_graph(node("loss", "call_method", "sum", REF), returned=returned)

    with pytest.raises(ValidationError, match=match):
        run(graph).datum_gradients(0, some_logprobs(2))


def test_a_loss_without_a_gradient_is_rejected() -> None:
    graph = a_graph(
        node("sum", "call_method", "sum", REF),
        node("loss", "call_method", "detach", {"ref": "sum"}),
    )

    with pytest.raises(ValidationError, match="does not depend"):
        run(graph).datum_gradients(0, some_logprobs(2))

    assert run(graph).evaluate(some_logprobs(2)).loss < 0, "without slopes it may be told"


def test_gradients_that_are_not_finite_fail_the_work() -> None:
    graph = a_graph(
        node("zero", "call_function", "operator.mul", REF, 0.0),
        node("root", "call_method", "sqrt", {"ref": "zero"}),
        node("loss", "call_method", "sum", {"ref": "root"}),
    )
    loss = run(graph)

    assert loss.datum_gradients(0, some_logprobs(2)).isfinite().all()
    with pytest.raises(ValidationError, match="gradient"):
        loss.evaluate(some_logprobs(2))


def test_logprobs_that_are_not_finite_fail_the_work_item() -> None:
    graph = a_graph(node("loss", "call_method", "sum", REF))

    with pytest.raises(ValidationError, match="log-probabilities"):
        run(graph).evaluate(torch.tensor([-1.0, math.nan]))


# Bounds


def test_too_many_nodes_are_rejected() -> None:
    nodes = [node(f"n{i}", "call_method", "exp", REF) for i in range(1000)]

    with pytest.raises(ValidationError, match="nodes"):
        run(a_graph(*nodes))


T = 4000
"""Long enough that T times T numbers are too many."""
COLUMN_REF = {"ref": "column"}
COLUMN = node("column", "call_method", "view", REF, -1, 1)


@pytest.mark.parametrize(
    "nodes",
    [
        [COLUMN, node("big", "call_function", "operator.add", REF, {"ref": "column"})],
        [COLUMN, node("big", "call_function", "torch.matmul", {"ref": "column"}, {"ref": "row"})],
        [node("big", "call_function", "torch.outer", REF, REF)],
        [node("big", "call_function", "torch.functional.meshgrid", REF, REF, indexing="ij")],
        [node("big", "call_function", "torch.diag", REF)],
        [node("big", "call_function", "torch.eye", T)],
        [node("big", "call_function", "torch.zeros", T, T)],
        [node("big", "call_function", "torch.zeros", {"ref": "size"}, {"ref": "size"})],
        [node("big", "call_method", "expand", REF, T, T)],
        [node("big", "call_method", "repeat", REF, T)],
        [node("big", "call_function", "torch.tile", REF, {"tuple": [T]})],
        [node("big", "call_function", "torch.arange", 0, 1, 1e-9)],
        [node("big", "call_function", "torch.linspace", 0, 1, 1 << 24)],
        [node("big", "call_function", "torch.repeat_interleave", REF, T)],
        [node("big", "call_function", "torch.repeat_interleave", REF, {"ref": "size"})],
        [node("big", "call_function", "torch._C._nn.one_hot", {"ref": "large"})],
        [node("big", "call_function", "torch._C._nn.one_hot", {"ref": "zeros"}, T)],
        [node("big", "call_function", "torch.nn.functional.pad", REF, {"tuple": [0, 1 << 24]})],
        [node("big", "call_function", "torch.where", {"ref": "mask"}, {"ref": "row"}, COLUMN_REF)],
        [node("big", "call_function", "torch.masked_select", COLUMN_REF, {"ref": "mask"})],
        [
            node(
                *("big", "call_function", "operator.getitem", REF),
                {"tuple": [{"ref": "index_column"}]},
            ),
            node("bigger", "call_function", "operator.add", {"ref": "big"}, REF),
        ],
        [node("big", "call_function", "torch.cat", [REF] * 3000)],
        [node("big", "call_function", "operator.pow", 10, 10**7)],
        [node("big", "call_method", "new_zeros", REF, {"tuple": [T, T]})],
    ],
    ids=lambda nodes: nodes[-1].target + str(nodes[-1].args)[:20],
)
def test_a_result_that_would_be_too_large_is_not_computed(nodes: list[CustomLossNode]) -> None:
    before = [
        node("row", "call_method", "view", REF, 1, -1),
        node("mask", "call_function", "operator.lt", REF, 0),
        node("zeros", "call_method", "long", {"ref": "mask"}),
        node("index_column", "call_method", "view", {"ref": "zeros"}, -1, 1),
        node("large", "call_function", "operator.mul", {"ref": "zeros"}, 10**12),
        node("size", "call_method", "sum", {"ref": "zeros"}),
    ]
    if all(one.name != "column" for one in nodes):
        before.append(COLUMN)
    graph = a_graph(*before, *nodes, node("loss", "call_method", "sum", REF))

    with pytest.raises(ValidationError, match="size limits"):
        run(graph, T).datum_gradients(0, some_logprobs(T))


def test_memory_saved_for_the_backward_is_bounded() -> None:
    wide = node("wide", "call_method", "expand", REF, 1000, -1)
    exps = [node(f"e{i}", "call_function", "torch.exp", {"ref": "wide"}) for i in range(20)]
    graph = a_graph(wide, *exps, node("loss", "call_method", "sum", REF))

    with pytest.raises(ValidationError, match="size limits"):
        run(graph, 2000).datum_gradients(0, some_logprobs(2000))


def test_a_scalar_input_needs_no_shape() -> None:
    """The wire gives one back as it gives a list of one."""
    declared = [CustomLossInput(name="logprobs", rank=1), CustomLossInput(name="beta", rank=0)]
    graph = a_graph(
        node("beta", "placeholder", "beta"),
        node("whole", "call_method", "sum", REF),
        node("loss", "call_function", "operator.mul", {"ref": "whole"}, {"ref": "beta"}),
    )
    loss = GraphLoss(declared, graph, [inputs(target_tokens=[1, 2], beta=torch.tensor([0.5]))])

    gradients = loss.datum_gradients(0, some_logprobs(2))

    assert torch.equal(gradients, torch.tensor([0.5, 0.5]))


def test_empty_tensors_are_bounded_too() -> None:
    """Each is an object of hundreds of bytes, though it has no numbers."""
    many = [node(f"s{i}", "call_function", "torch.tensor_split", REF, 60_000) for i in range(4)]
    graph = a_graph(*many, node("loss", "call_method", "sum", REF))

    with pytest.raises(ValidationError, match="size limits"):
        run(graph, T).datum_gradients(0, some_logprobs(T))


def test_computation_is_bounded_even_if_results_are_small() -> None:
    square = [
        node("column", "call_method", "view", REF, -1, 1),
        node("square", "call_function", "operator.mul", {"ref": "column"}, REF),
    ]
    sums = [
        node(f"s{i}", "call_function", "torch.matmul", {"ref": "square"}, {"ref": "square"})
        for i in range(3)
    ]
    graph = a_graph(*square, *sums, node("loss", "call_method", "sum", REF))

    with pytest.raises(ValidationError, match="size limits"):
        run(graph, 1000).datum_gradients(0, some_logprobs(1000))


def test_total_time_over_all_data_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.engine.model.graph_loss.MOST_CPU_S", 0.0)
    loss = run(a_graph(node("loss", "call_method", "sum", REF)))

    with pytest.raises(ValidationError, match="CPU time"):
        loss.datum_gradients(0, some_logprobs(2))


# The table


def test_every_allowed_operation_exists() -> None:
    assert all(map(callable, FUNCTION_OF.values()))
    assert all(map(callable, METHOD_OF.values()))


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) * 0.8 + 0.1
ROWS = torch.tensor([2, 1, 0])
LISTS: tuple[tuple[Any, ...], ...] = (
    *((X,), (X, X), (X, X.T), (X[0],), (X[0], X[0]), (X, 2), (X, 0, X.long()), (X, 1, 2)),
    *((X, X > 0.5), (X, X > 0.5, 1.0), (X > 0.5, X, X), ([X, X],), (X.long(),), (3,), ([2, 3],)),
    *((X, [1, 2]), (X, X.long(), 1), (2, 3), (0.0, 1.0, 5), (X, (5, 3, 4)), (X[None], X.T[None])),
    *((X, 1), (X > 0.5, X > 0.5), (X, [0]), (X, 0, ROWS, X), (X, 0, ROWS, 1.0), (X, 0, ROWS)),
    *((0.5,), (X, 0, 1), (X, X, 0.5), (X, X > 0.5, X), (X, X[0]), (X, 0, 0, 2), (X, X.long())),
    *((X, (5, 3, 4), 1.0), ([2, 3], 1.0), (X, (1, 0)), (X, 2, 0, 1.0), (X, (2, 6)), (X, X, X)),
    *((X, 0, X.long(), X), (X, 0, X.long(), X, "sum"), (X, X, torch.ones(3)), (X, ROWS)),
    *((X, torch.ones(1)), (X, 1, (2, 2)), (X, "shape")),
)
"""Arguments, of which every operation should take some."""


REFUSALS = r"^$|cannot be called on meta|expected tensor_indices_or_sections to be on cpu"
TARGETS = {*FUNCTION_OF, *(name for name in METHOD_OF if f"torch.{name}" not in FUNCTION_OF)}


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.filterwarnings("ignore")
def test_no_result_is_larger_than_its_predicted_bound(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sizes alone, or without memory, where a call is too large to be made."""
    function = FUNCTION_OF.get(target) or METHOD_OF[target]
    name = target.rpartition(".")[2]
    taken = 0
    for args in LISTS:
        try:
            result = function(*args)
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError, ArithmeticError):
            continue
        taken += 1
        largest = max([one.numel() for one in tensors_in([result])], default=0)
        if name not in graph_functions._CHECK_THEMSELVES:
            assert largest <= largest_result(name, args, {}), args
        if largest > 1 and name not in ("as_tensor", "new_tensor", "tensor"):
            monkeypatch.setattr(graph_functions, "MOST_NUMBERS", largest - 1)
            # Torch refuses where a tensor stands for a flag or for sizes of parts.
            with pytest.raises((TooManyNumbersError, RuntimeError), match=REFUSALS):
                checked(target, function, args)
            monkeypatch.undo()
    assert taken, "no arguments in the list fit it"
    assert graph_functions.MOST_NUMBERS == MOST_NUMBERS


def checked(target: str, function: Fn, args: tuple[Any, ...]) -> None:
    check_size(target, function, args, {})
    function(*args)  # some look after themselves
