"""Losses as data: traced from a Python function, checked, and encoded as a list of operations.

A loss is traced once per session, as a function of the log-probabilities and inputs of one datum.
If the service runs uploaded losses, the loss is uploaded and training passes name it. Otherwise the
traced function runs on the client for each datum, under the same rules; programs need not change.

Knows nothing of training passes, which `losses/custom.py` runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tinsmith.client.losses.traced_losses import TracedLosses
from tinsmith.client.poller import Poll
from tinsmith.client.session import Session
from tinsmith.errors import ValidationError
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import Datum
from tinsmith.types.loss_operations import INPUT_NAME, LOGPROBS, MAX_INPUTS, METRIC_NAME
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.training import (
    CreateCustomLossResponse,
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
)

if TYPE_CHECKING:
    import torch
    import torch.fx

_LIBRARIES = frozenset({"torch", "math", "operator"})
_LEAVES_TORCH = frozenset({"item", "numpy", "tolist"})


class PerDatumLossFn(Protocol):
    """A function `(logprobs, *inputs) -> (loss, metrics)` of one datum's tensors.

    The loss is a scalar tensor; metrics are scalar tensors named `custom/…:sum` or `custom/…:mean`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Mapping[str, Any]]:
        """Compute the datum's loss and metrics."""
        ...


@dataclasses.dataclass(frozen=True)
class LossHandle:
    """A loss from `ServiceClient.create_custom_loss`, usable by the clients of its session."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """The parameters in order; the first is `logprobs`."""
    session_id: str
    graph: torch.fx.GraphModule = dataclasses.field(repr=False, compare=False)
    loss_id: str | None = None
    """The service's id of the loss; None if it runs on the client."""

    @property
    def key(self) -> str:
        """A key that is equal for losses with the same operations and inputs."""
        return _key(self.graph, self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of its inputs in a datum's `loss_fn_inputs`, in order, without `logprobs`."""
        return tuple(one.name for one in self.inputs[1:])


class TracedLoss(msgspec.Struct, frozen=True):
    """A checked loss that does not belong to a session yet."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    module: torch.fx.GraphModule
    graph: CustomLossGraph

    @property
    def key(self) -> str:
        """A key that is equal for losses with the same operations and inputs."""
        return _key(self.module, self.inputs)


def trace(fn: PerDatumLossFn, input_ranks: Mapping[str, int]) -> TracedLoss:
    """Trace a loss and check that it can be uploaded.

    Raises:
        ValueError: It breaks a rule for uploaded losses; the message says which.
        ImportError: torch is not installed.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(fn, name, input_ranks)
    module = _traced(fn, name)
    nodes = [_checked_node(node, name) for node in module.graph.nodes]
    return TracedLoss(name, inputs, module, CustomLossGraph(nodes=nodes))


async def make_handle(session: Session, traced: TracedLoss, known: TracedLosses) -> LossHandle:
    """Add a loss to a session, and upload it if the service runs uploaded losses."""
    try:
        session_id = await session.session_id()
        loss_id = None
        if session.flags.custom_loss_server_side:
            loss_id = await _upload(session, session_id, traced)
    except BaseException:
        known.forget(traced.key)
        raise
    return LossHandle(traced.name, traced.inputs, session_id, traced.module, loss_id)


async def _upload(session: Session, session_id: str, traced: TracedLoss) -> str:
    request = CreateCustomLossRequest(
        session_id=session_id,
        custom_loss_seq_id=session.next_number("custom_loss"),
        name=traced.name,
        inputs=list(traced.inputs),
        graph=traced.graph,
    )
    submitted: UntypedAPIFuture = await session.call("create_custom_loss", request)
    poll = Poll(session, submitted.request_id, "CreateCustomLoss")
    made: CreateCustomLossResponse = await poll.result()
    return made.loss_id


# Use


async def check_session(handle: LossHandle, session: Session) -> None:
    """Refuse a loss that was created in another session."""
    session_id = await session.session_id()
    if handle.session_id != session_id:
        raise ValidationError(
            f"loss {handle.name!r} belongs to session {handle.session_id}, but this client to "
            f"{session_id}",
            remedy="create it with the ServiceClient that created the training client",
        )


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Check that every datum has every input of a loss, with the right rank.

    Raises:
        ValueError: An input is missing or has another rank.
    """
    for index, datum in enumerate(data):
        for given in handle.inputs:
            # The model returns one log-probability per target, in the targets' shape.
            key = "target_tokens" if given.name == LOGPROBS else given.name
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                raise ValidationError(
                    f"datum {index} has no {key!r} in its loss_fn_inputs, "
                    f"which loss {handle.name!r} requires"
                )
            rank = 1 if tensor.shape is None else len(tensor.shape)
            if rank != given.rank:
                raise ValidationError(
                    f"{key!r} of datum {index} has rank {rank}; loss {handle.name!r} takes "
                    f"{given.name} of rank {given.rank}"
                )


def evaluate(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Run a loss on the client, datum by datum; sums losses, reduces metrics by name suffix."""
    import torch

    total = torch.zeros(())
    metrics: dict[str, float] = {}
    for index, (datum, logprobs_of_datum) in enumerate(zip(data, logprobs, strict=True)):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
        loss, named = handle.graph(logprobs_of_datum, *inputs)
        total = total + _scalar(loss, f"loss {handle.name!r}", index).reshape(())
        for name, value in named.items():
            number = _scalar(value, f"metric {name!r}", index).item()
            metrics[name] = metrics.get(name, 0.0) + number
    for name in metrics:
        if name.endswith(":mean"):
            metrics[name] /= len(data)
    return total, metrics


def _scalar(value: Any, what: str, index: int) -> torch.Tensor:
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValidationError(f"{what} must be a scalar tensor; it is not for datum {index}")
    return value


def _key(module: torch.fx.GraphModule, inputs: tuple[CustomLossInput, ...]) -> str:
    import hashlib

    signature = ",".join(f"{given.name}:{given.rank}" for given in inputs)
    return hashlib.sha256(f"{signature}\n{module.code}".encode()).hexdigest()


# Rules


def _refused(name: str, why: str, remedy: str | None = None) -> ValidationError:
    return ValidationError(f"custom loss {name!r} {why}", remedy=remedy)


def _inputs(fn: PerDatumLossFn, name: str, ranks: Mapping[str, int]) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].name != LOGPROBS:
        raise _refused(name, "must take logprobs as its first parameter")
    if len(parameters) > MAX_INPUTS:
        raise _refused(name, f"has {len(parameters)} parameters; the maximum is {MAX_INPUTS}")
    for parameter in parameters:
        _check_parameter(parameter, name)
    names = [parameter.name for parameter in parameters]
    if set(names) != set(ranks):
        raise _refused(
            name,
            f"takes {', '.join(names)}; input_ranks has {', '.join(map(str, ranks)) or 'nothing'}",
            "pass one rank for each parameter, and no others",
        )
    return tuple(CustomLossInput(name=each, rank=_rank(each, ranks[each], name)) for each in names)


def _check_parameter(parameter: inspect.Parameter, name: str) -> None:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise _refused(name, f"has {parameter}, which is not a plain positional parameter")
    if parameter.default is not parameter.empty:
        raise _refused(
            name, f"has a default for {parameter.name}; every datum must provide it instead"
        )
    if not INPUT_NAME.fullmatch(parameter.name):
        raise _refused(
            name,
            f"has a parameter with the invalid name {parameter.name!r}",
            "use at most 64 lower-case letters, digits and underscores",
        )


def _rank(parameter: str, rank: Any, name: str) -> CustomLossInputRank:
    allowed = (1, 2) if parameter == LOGPROBS else (0, 1, 2)
    if rank not in allowed:
        raise _refused(name, f"has rank {rank!r} for {parameter}; expected one of {allowed}")
    found: CustomLossInputRank = int(rank)  # type: ignore[assignment]  # checked above
    return found


def _traced(fn: PerDatumLossFn, name: str) -> torch.fx.GraphModule:
    try:
        import torch.fx
    except ImportError as exc:
        raise ImportError(
            "create_custom_loss traces the loss with torch, which is not installed; "
            "run `pip install torch`"
        ) from exc
    try:
        return torch.fx.symbolic_trace(fn)
    except Exception as exc:  # the user's code may raise anything
        raise _refused(
            name,
            f"cannot be traced: {exc}",
            "use tensors and functions of torch and math, and do not branch on values",
        ) from exc


def _checked_node(node: torch.fx.Node, name: str) -> CustomLossNode:
    if node.op == "get_attr":
        raise _refused(
            name,
            f"captures a tensor ({node.target})",
            "pass it in loss_fn_inputs",
        )
    if node.op == "call_module":
        raise _refused(name, f"calls a module ({node.target})", "use torch.nn.functional")
    if node.op == "call_method":
        _check_method(str(node.target), name)
    if node.op == "output":
        _check_returned(node.args[0], name)
    return CustomLossNode(
        op=node.op,  # type: ignore[arg-type]  # the others are refused above
        name=node.name,
        target=_target(node, name),
        args=[_encoded(argument, name) for argument in node.args],
        kwargs={key: _encoded(argument, name) for key, argument in node.kwargs.items()},
    )


def _check_method(method: str, name: str) -> None:
    if method == "backward":
        raise _refused(
            name, "calls backward()", "return the loss; the service runs the backward pass"
        )
    if method in _LEAVES_TORCH:
        raise _refused(
            name,
            f"calls {method}(), which converts a tensor to a Python value",
            "keep values as tensors",
        )


def _check_returned(returned: Any, name: str) -> None:
    import torch.fx

    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise _refused(name, "must return (loss, metrics)")
    loss, metrics = returned
    if not isinstance(loss, torch.fx.Node):
        raise _refused(name, f"must return its loss as a tensor, not {loss!r:.80}")
    if not isinstance(metrics, dict):
        raise _refused(name, f"must return its metrics as a dict, not {metrics!r:.80}")
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not METRIC_NAME.fullmatch(metric):
            raise _refused(
                name,
                f"has a metric with the invalid name {metric!r}",
                "name it custom/<name>:sum or custom/<name>:mean, in lower case",
            )
        if not isinstance(value, torch.fx.Node):
            raise _refused(name, f"returns metric {metric!r} as {value!r:.80}, not as a tensor")


# Encoding


def _target(node: torch.fx.Node, name: str) -> str:
    if node.op != "call_function":
        return str(node.target)
    if node.target is getattr:
        return "getattr"
    # The names that torch itself writes into generated code.
    from torch.fx.node import _get_qualified_name

    target = _get_qualified_name(node.target)  # type: ignore[arg-type]  # a function
    if target.startswith("_operator."):  # the C module behind `operator`
        target = target.removeprefix("_")
    if target.partition(".")[0] not in _LIBRARIES:
        raise _refused(name, f"calls {target}", "use only functions of torch, math and operator")
    return target


def _encoded(argument: Any, name: str) -> Any:
    """An argument as JSON: scalars and lists unchanged, other values as an object with one key."""
    import torch.fx

    if isinstance(argument, torch.fx.Node):
        return {"ref": argument.name}
    if argument is None or isinstance(argument, bool | int | str):
        return argument
    if isinstance(argument, float):
        return argument if math.isfinite(argument) else {"float": str(argument)}
    if isinstance(argument, list):
        return [_encoded(item, name) for item in argument]
    if isinstance(argument, tuple):
        return {"tuple": [_encoded(item, name) for item in argument]}
    if isinstance(argument, dict) and all(isinstance(key, str) for key in argument):
        return {"dict": {key: _encoded(item, name) for key, item in argument.items()}}
    return _encoded_constant(argument, name)


def _encoded_constant(argument: Any, name: str) -> dict[str, Any]:
    import torch

    if isinstance(argument, slice):
        bounds = (argument.start, argument.stop, argument.step)
        return {"slice": [_encoded(bound, name) for bound in bounds]}
    if argument is Ellipsis:
        return {"ellipsis": True}
    if isinstance(argument, torch.device):
        return {"device": str(argument)}
    for kind, key in (
        (torch.dtype, "dtype"),
        (torch.layout, "layout"),
        (torch.memory_format, "memory_format"),
    ):
        if isinstance(argument, kind):
            return {key: str(argument).removeprefix("torch.")}
    raise _refused(name, f"passes a {type(argument).__name__}, which cannot be sent")
