"""Uploaded losses: a graph of torch operations over the log-probabilities of one datum.

The graph was checked at upload (`service/api/loss_graphs.py`), but it is still untrusted. Only the
operations in `graph_functions.py` run, with limits on nodes, on the size of tensors and of what is
saved for the backward, on the amount of work, and on CPU time.

A loss runs on the CPU in float32, on copies of its inputs. The losses of all data are summed.
"""

# C cell, D datum

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.model.graph_functions import (
    DTYPE_OF,
    FUNCTION_OF,
    METHOD_OF,
    MOST_BITS,
    Function,
    TooManyNumbersError,
    check_size,
    tensors_in,
    work_of,
)
from tinsmith.engine.model.loss_inputs import TARGETS, Inputs, dense_tensor, read_targets
from tinsmith.engine.model.losses import Evaluation, Loss, check_finite
from tinsmith.errors import ValidationError, shown
from tinsmith.observe.training_metrics import LOSS, TOKENS
from tinsmith.types.loss_operations import DEVICE, METRIC_NAME, argument_of
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

MOST_NODES = 1000
TENSOR_NUMBERS = 256
"""The overhead of a tensor, in numbers: empty tensors take memory too."""
MOST_KEPT = 1 << 25
"""Maximum numbers in all tensors for one datum; all are saved for the backward."""
MOST_WORK = 1 << 30
"""Maximum numbers processed by all operations on one datum."""
MOST_CPU_S = 120.0
"""CPU time for all data of a pass; unlike wall time it hardly depends on other load."""


class GraphLoss(Loss):
    """An uploaded loss over the data of one pass; `losses.py` documents its use.

    Args:
        inputs: The parameters of the loss, the log-probabilities first.
        graph: Its operations.
        data: The `loss_fn_inputs` of each datum.
        lengths: The number of positions of each datum, to check the targets against.

    Raises:
        ValidationError: A datum lacks an input of the loss, or it has the wrong rank.
    """

    def __init__(
        self,
        inputs: Sequence[CustomLossInput],
        graph: CustomLossGraph,
        data: Sequence[Inputs],
        lengths: Sequence[int] | None = None,
    ) -> None:
        if len(graph.nodes) > MOST_NODES:
            raise ValidationError(
                f"the loss has {len(graph.nodes)} nodes; the maximum is {MOST_NODES}"
            )
        self.targets = read_targets(data, lengths)
        self._graph = graph
        self._inputs = [_read(inputs, one, index) for index, one in enumerate(data)]
        self._results: dict[int, _Result] = {}
        self._cpu_s_left = MOST_CPU_S

    def datum_gradients(self, index: int, lp: Tensor) -> Tensor:
        """dloss/dlp of one datum, in the shape of its log-probabilities.

        Raises:
            ValidationError: The loss cannot be computed, or does not depend on its logprobs.
        """
        result = self._results[index] = self._run(index, lp, with_gradients=True)
        assert result.gradients is not None
        gradients = result.gradients.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return gradients.reshape(lp.shape).to(lp.device)

    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """The loss and the metrics; data whose gradients were computed are not run again."""
        losses: list[float] = []
        metrics: dict[str, float] = {}
        lp_C = lp_C.detach().reshape(-1).cpu()
        for index, span in enumerate(self.targets.spans):
            result = self._results.get(index)
            if result is None:
                result = self._run(index, lp_C[span], with_gradients=False)
            check_finite(
                result.loss, lp_C[span], lp_C[:0] if result.gradients is None else result.gradients
            )
            losses.append(result.loss)
            for name, value in result.metrics.items():
                share = value / len(self._inputs) if name.endswith(":mean") else value
                metrics[name] = metrics.get(name, 0.0) + share
        loss = math.fsum(losses)
        return Evaluation(loss, {LOSS: loss, TOKENS: float(self.targets.cells), **metrics})

    def _run(self, index: int, lp: Tensor, *, with_gradients: bool) -> _Result:
        shape = self.targets.tokens[index].shape
        logprobs = lp.detach().to("cpu", torch.float32).reshape(shape).clone()
        given = [logprobs.requires_grad_(with_gradients), *(x.clone() for x in self._inputs[index])]
        started = time.thread_time()
        run = _Run(self._graph, started + self._cpu_s_left)
        try:
            with torch.set_grad_enabled(with_gradients):
                loss, metrics = _checked(run.returned(given))
            gradients = _gradients(loss, logprobs) if with_gradients else None
        finally:
            self._cpu_s_left -= time.thread_time() - started
        return _Result(float(loss.detach()), metrics, gradients)


class _Result(NamedTuple):
    loss: float
    metrics: dict[str, float]
    gradients: Tensor | None


def _read(declared: Sequence[CustomLossInput], inputs: Inputs, index: int) -> list[Tensor]:
    """The inputs of one datum after the log-probabilities, in declaration order."""
    found: list[Tensor] = []
    for number, one in enumerate(declared):
        name = one.name if number else TARGETS
        tensor = inputs.get(name)
        if tensor is None:
            raise ValidationError(f"datum {index} has no {name!r}, which the loss requires")
        dense = dense_tensor(tensor)
        if one.rank == 0 and dense.numel() == 1:
            dense = dense.reshape(())  # a number has no shape on the wire, nor has a list of one
        if dense.ndim != one.rank:
            raise ValidationError(
                f"datum {index}: {name} has {dense.ndim} dimensions; the loss takes {one.name} "
                f"with {one.rank}"
            )
        found.append(dense)
    return found[1:]


def _checked(returned: Any) -> tuple[Tensor, dict[str, float]]:
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        raise ValidationError("the loss must return a loss and a dict of metrics")
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ValidationError("the loss must be a tensor with one element")
    found: dict[str, float] = {}
    for name, one in (metrics or {}).items():
        if not METRIC_NAME.fullmatch(name):
            raise ValidationError(f"the loss has a metric with the invalid name {shown(name)}")
        if not isinstance(one, Tensor) or one.numel() != 1:
            raise ValidationError(f"the metric {name!r} must be a tensor with one element")
        found[name] = float(one.detach())
    return loss.reshape(()), found


def _gradients(loss: Tensor, logprobs: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise ValidationError(
            "the loss does not depend on its logprobs",
            remedy="check it for detach() and for functions of math, which drop the gradient",
        )
    try:
        [found] = torch.autograd.grad(loss, [logprobs])
    except RuntimeError as exc:
        raise ValidationError(f"the loss cannot be differentiated: {_first_line(exc)}") from exc
    return found


class _Run:
    """One evaluation of the graph."""

    def __init__(self, graph: CustomLossGraph, cpu_deadline_s: float) -> None:
        self._nodes = graph.nodes
        self._deadline_s = cpu_deadline_s
        self._made: dict[str, Any] = {}
        self._kept = 0
        self._work = 0

    def returned(self, given: Sequence[Tensor]) -> Any:
        """The value of the output node."""
        inputs = iter(given)
        for node in self._nodes:
            if node.op == "output":
                return _argument(node.args[0] if node.args else None, self._made)
            if node.op == "placeholder":
                self._made[node.name] = next(inputs, None)
            else:
                self._made[node.name] = self._called(node)
            if time.thread_time() > self._deadline_s:
                raise ValidationError(
                    f"the loss exceeded its CPU time; stopped after {shown(node.name)}",
                    remedy="send less data per call, or simplify the loss",
                )
        raise ValidationError("the loss returns nothing")

    def _called(self, node: CustomLossNode) -> Any:
        args = [_argument(one, self._made) for one in node.args]
        kwargs = {name: _argument(one, self._made) for name, one in node.kwargs.items()}
        function = _looked_up(node, args, kwargs)
        name = node.target.rpartition(".")[2]
        try:
            check_size(node.target, function, args, kwargs)
            result = function(*args, **kwargs)
        except TooManyNumbersError:
            raise _too_large(node) from None
        except (
            *(ArithmeticError, AttributeError, IndexError, KeyError, NotImplementedError),
            *(RuntimeError, TypeError, ValueError),
        ) as exc:
            raise ValidationError(
                f"the loss cannot compute {node.target} ({node.name}): {_first_line(exc)}"
            ) from exc
        self._kept += sum(one.numel() + TENSOR_NUMBERS for one in tensors_in([result]))
        self._work += work_of(name, args)
        is_long = isinstance(result, int) and result.bit_length() > MOST_BITS
        if is_long or self._kept > MOST_KEPT or self._work > MOST_WORK:
            raise _too_large(node)
        return result


def _looked_up(node: CustomLossNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Function:
    table = {"call_function": FUNCTION_OF, "call_method": METHOD_OF}.get(node.op, {})
    function = table.get(node.target)
    if function is None:
        raise ValidationError(f"the loss calls {shown(node.target)}, which is not supported")
    if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
        raise ValidationError(f"the loss calls {node.target}() on something that is not a tensor")
    if "out" in kwargs:
        raise ValidationError(f"the loss calls {node.target} with 'out', which is not allowed")
    return function


def _too_large(node: CustomLossNode) -> ValidationError:
    return ValidationError(f"the loss exceeds its size limits in {node.target} ({node.name})")


def _first_line(error: BaseException) -> str:
    """The first line of an error, without torch's own location."""
    return str(error).strip().partition("\n")[0][:300]


def _argument(plain: Any, made: Mapping[str, Any]) -> Any:
    return argument_of(plain, made, _constant)


def _constant(kind: str | None, content: str) -> Any:
    if kind is None:  # the device it was traced on; it runs on the CPU
        return "cpu" if DEVICE.fullmatch(content) else content
    if kind == "dtype" and content in DTYPE_OF:
        return DTYPE_OF[content]
    constants: dict[str, Any] = {
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "memory_format": {
            "contiguous_format": torch.contiguous_format,
            "preserve_format": torch.preserve_format,
        }.get(content),
    }
    if constants.get(kind) is None:
        raise ValidationError(f"the loss has the invalid argument {shown({kind: content})}")
    return constants[kind]
