"""Uploaded losses: a list of operations over the log-probabilities of one datum, run in torch.

The graph was checked when it came (`server/loss_graphs.py`). It is still a stranger's, so that here
nothing runs but what `graph_functions.py` has, and nothing without bounds: on nodes, on the numbers
that a tensor has and that are kept for the gradient, on the numbers gone over, and on time.

A loss runs on the CPU, in float32, on copies of its inputs. The losses of all data are added up.
"""

# C cell, D datum

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.errors import ValidationError, shown
from tinsmith.model.graph_functions import (
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
from tinsmith.model.loss_inputs import TARGETS, Inputs, dense_tensor, read_targets
from tinsmith.model.losses import Evaluation, Loss, check_finite
from tinsmith.observe.training_metrics import LOSS, TOKENS
from tinsmith.types.loss_operations import DEVICE, METRIC_NAME, argument_of
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

MOST_NODES = 1000
TENSOR_NUMBERS = 256
"""What a tensor takes besides its numbers, as so many of them: empty ones take memory too."""
MOST_KEPT = 1 << 25
"""Numbers of all tensors that a loss makes of one datum; they are all kept, for the slopes."""
MOST_WORK = 1 << 30
"""Numbers that all operations on one datum may go over."""
MOST_CPU_S = 120.0
"""For all data of a pass. Processor time, which is about the same on a busy machine."""


class CustomLoss(Loss):
    """An uploaded loss over the data of one pass; see `losses.py` for its use.

    Args:
        inputs: The parameters of the loss, the log-probabilities first.
        graph: Its operations.
        data: The `loss_fn_inputs` of each datum.
        lengths: How many positions each datum has, if targets are to be checked against that.
        most_cpu_s: Processor time that the loss may take for all data together.

    Raises:
        ValidationError: A datum lacks an input of the loss, or has it with another rank.
    """

    def __init__(
        self,
        inputs: Sequence[CustomLossInput],
        graph: CustomLossGraph,
        data: Sequence[Inputs],
        lengths: Sequence[int] | None = None,
        *,
        most_cpu_s: float = MOST_CPU_S,
    ) -> None:
        if len(graph.nodes) > MOST_NODES:
            raise ValidationError(f"the loss has {len(graph.nodes)} nodes; {MOST_NODES} may run")
        self.targets = read_targets(data, lengths)
        self._graph = graph
        self._inputs = [_read(inputs, one, index) for index, one in enumerate(data)]
        self._results: dict[int, _Result] = {}
        self._cpu_s_left = most_cpu_s

    def datum_slopes(self, index: int, lp: Tensor) -> Tensor:
        """See the base class.

        Raises:
            ValidationError: The loss cannot be computed, or does not depend on its logprobs.
        """
        result = self._results[index] = self._run(index, lp, with_slopes=True)
        assert result.slopes is not None
        slopes = result.slopes.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return slopes.reshape(lp.shape).to(lp.device)

    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """See the base class; a datum whose slopes were taken is not run again."""
        losses: list[float] = []
        metrics: dict[str, float] = {}
        lp_C = lp_C.detach().reshape(-1).cpu()
        for index, span in enumerate(self.targets.spans):
            result = self._results.get(index)
            if result is None:
                result = self._run(index, lp_C[span], with_slopes=False)
            check_finite(
                result.loss, lp_C[span], lp_C[:0] if result.slopes is None else result.slopes
            )
            losses.append(result.loss)
            for name, value in result.metrics.items():
                share = value / len(self._inputs) if name.endswith(":mean") else value
                metrics[name] = metrics.get(name, 0.0) + share
        loss = math.fsum(losses)
        return Evaluation(loss, {LOSS: loss, TOKENS: float(self.targets.cells), **metrics})

    def _run(self, index: int, lp: Tensor, *, with_slopes: bool) -> _Result:
        shape = self.targets.tokens[index].shape
        logprobs = lp.detach().to("cpu", torch.float32).reshape(shape).clone()
        given = [logprobs.requires_grad_(with_slopes), *(x.clone() for x in self._inputs[index])]
        started = time.thread_time()
        run = _Run(self._graph, started + self._cpu_s_left)
        try:
            with torch.set_grad_enabled(with_slopes):
                loss, metrics = _checked(run.returned(given))
            slopes = _slopes(loss, logprobs) if with_slopes else None
        finally:
            self._cpu_s_left -= time.thread_time() - started
        return _Result(float(loss.detach()), metrics, slopes)


class _Result(NamedTuple):
    loss: float
    metrics: dict[str, float]
    slopes: Tensor | None


def _read(declared: Sequence[CustomLossInput], inputs: Inputs, index: int) -> list[Tensor]:
    """The inputs of one datum that follow the log-probabilities, in their order."""
    found: list[Tensor] = []
    for number, one in enumerate(declared):
        name = one.name if number else TARGETS
        tensor = inputs.get(name)
        if tensor is None:
            raise ValidationError(f"datum {index} has no {name!r}, which the loss reads")
        dense = dense_tensor(tensor)
        if one.rank == 0 and dense.numel() == 1:
            dense = dense.reshape(
                ()
            )  # on the wire a number has no shape, as a list of one has none
        if dense.ndim != one.rank:
            raise ValidationError(
                f"datum {index}: {name} has {dense.ndim} dimensions; the loss takes {one.name} "
                f"with {one.rank}"
            )
        found.append(dense)
    return found[1:]


def _checked(returned: Any) -> tuple[Tensor, dict[str, float]]:
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        raise ValidationError("the loss returns something else than a loss and its metrics")
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ValidationError("the loss must be a tensor of one number")
    found: dict[str, float] = {}
    for name, one in (metrics or {}).items():
        if not METRIC_NAME.fullmatch(name):
            raise ValidationError(f"the loss has a metric {shown(name)}")
        if not isinstance(one, Tensor) or one.numel() != 1:
            raise ValidationError(f"the metric {name!r} must be a tensor of one number")
        found[name] = float(one.detach())
    return loss.reshape(()), found


def _slopes(loss: Tensor, logprobs: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise ValidationError(
            "the loss does not depend on its logprobs",
            remedy="look for detach() and for functions of math, which lose the gradient",
        )
    try:
        [found] = torch.autograd.grad(loss, [logprobs])
    except RuntimeError as exc:
        raise ValidationError(f"the loss cannot be differentiated: {_told(exc)}") from exc
    return found


class _Run:
    """One pass over the nodes."""

    def __init__(self, graph: CustomLossGraph, cpu_deadline_s: float) -> None:
        self._nodes = graph.nodes
        self._deadline_s = cpu_deadline_s
        self._made: dict[str, Any] = {}
        self._kept = 0
        self._work = 0

    def returned(self, given: Sequence[Tensor]) -> Any:
        """What the output node gives."""
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
                    f"the loss takes too long; it was stopped after {shown(node.name)}",
                    remedy="send fewer data at a time, or a simpler loss",
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
            raise _too_many(node) from None
        except (
            *(ArithmeticError, AttributeError, IndexError, KeyError, NotImplementedError),
            *(RuntimeError, TypeError, ValueError),
        ) as exc:
            raise ValidationError(
                f"the loss cannot compute {node.target} ({node.name}): {_told(exc)}"
            ) from exc
        self._kept += sum(one.numel() + TENSOR_NUMBERS for one in tensors_in([result]))
        self._work += work_of(name, args)
        is_long = isinstance(result, int) and result.bit_length() > MOST_BITS
        if is_long or self._kept > MOST_KEPT or self._work > MOST_WORK:
            raise _too_many(node)
        return result


def _looked_up(node: CustomLossNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Function:
    table = {"call_function": FUNCTION_OF, "call_method": METHOD_OF}.get(node.op, {})
    function = table.get(node.target)
    if function is None:
        raise ValidationError(f"the loss calls {shown(node.target)}, which is not run here")
    if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
        raise ValidationError(f"the loss calls {node.target}() on something else than a tensor")
    if "out" in kwargs:
        raise ValidationError(f"the loss calls {node.target} with 'out', which is not allowed")
    return function


def _too_many(node: CustomLossNode) -> ValidationError:
    return ValidationError(f"the loss makes too many numbers in {node.target} ({node.name})")


def _told(error: BaseException) -> str:
    """What torch says, without where in torch it was said."""
    return str(error).strip().partition("\n")[0][:300]


def _argument(plain: Any, made: Mapping[str, Any]) -> Any:
    return argument_of(plain, made, _constant)


def _constant(kind: str | None, content: str) -> Any:
    if kind is None:  # a device is where it was traced; it runs here
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
        raise ValidationError(f"the loss has an argument {shown({kind: content})}")
    return constants[kind]
