"""A custom loss, computed on the client between two passes over the model.

The first pass returns the log-probabilities lp of the targets. The user's function computes a loss
C from them. The second pass is a cross-entropy with the weights w = −dC/dlp: the gradient of
Σ −w·lp with respect to lp is −w = dC/dlp, so the accumulated gradient is that of C.

Both passes are queued when the call is made, so a later call such as the optimizer step waits for
the second pass, even before that can be sent. The user's function runs on a thread of its own and
does not block heartbeats, polls or the caller's event loop.

`losses/graph.py` has traced and uploaded losses.
"""

from __future__ import annotations

import array
import asyncio
import contextvars
import copy
import importlib.util
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from tinsmith.client.futures import APIFuture
from tinsmith.client.losses.graph import LossHandle, check_inputs, check_session, evaluate
from tinsmith.client.submission import Submitter, checked_data
from tinsmith.client.waits import say
from tinsmith.errors import DecodeError, ValidationError, shown
from tinsmith.types.inputs import Datum
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardOutput
from tinsmith.wire.protobuf import Parts

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@runtime_checkable
class GradientLoss(Protocol):
    """A loss that computes its own gradient, without torch."""

    def gradients(
        self, data: list[Datum], logprobs: list[Any]
    ) -> tuple[float, Sequence[Any], Mapping[str, float]]:
        """The loss, its gradient and metrics.

        Args:
            data: The data passed to `forward_backward_custom`.
            logprobs: For each datum, the log-probabilities of its targets, nested like
                `target_tokens`.

        Returns:
            The loss of the whole batch; dC/dlp for each datum, as a list or array with the shape of
            its log-probabilities; metrics by name.
        """
        ...


TensorLoss: TypeAlias = Callable[
    [list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, Any]]"
]
"""Takes the data and each datum's log-probabilities; returns the batch's loss and metrics."""

CustomLoss: TypeAlias = TensorLoss | GradientLoss | LossHandle


class Evaluated(NamedTuple):
    """The result of the user's function: the loss, and each datum's weights for the second pass."""

    loss: float
    weights: list[Any]
    metrics: dict[str, float]


def start_custom_pass(
    submitter: Submitter,
    data: Sequence[Datum],
    loss_fn: CustomLoss,
    loss_type_input: str | None = None,
    timeout: float | None = None,
) -> APIFuture[ForwardBackwardOutput]:
    """Start `TrainingClient.forward_backward_custom`; returns immediately."""
    if loss_type_input is not None:
        warnings.warn(
            "loss_type_input is deprecated: a custom loss always takes log-probabilities",
            DeprecationWarning,
            stacklevel=3,
        )
        if loss_type_input != "logprobs":
            raise ValidationError(
                f"loss_type_input is {shown(loss_type_input)}", remedy="leave it out"
            )
    data = checked_data(data, "custom")
    if isinstance(loss_fn, LossHandle):
        check_inputs(loss_fn, data)
        if loss_fn.loss_id is not None:
            return _start_uploaded(submitter, data, loss_fn, loss_fn.loss_id, timeout)
    if not isinstance(loss_fn, GradientLoss):
        _require_torch()
        if not callable(loss_fn) and not isinstance(loss_fn, LossHandle):
            raise TypeError(
                "a custom loss must be a function, a LossHandle or an object with gradients(), not "
                f"{type(loss_fn).__name__}"
            )
    return _start_two_passes(submitter, data, loss_fn, timeout)


def _start_uploaded(
    submitter: Submitter,
    data: list[Datum],
    handle: LossHandle,
    loss_id: str,
    timeout: float | None,
) -> APIFuture[ForwardBackwardOutput]:
    """Start a single pass that names a loss uploaded to the service."""
    bodies = submitter.encode_pass(data, "custom", {"loss_id": loss_id})
    ticket = submitter.queue.take_ticket()

    async def work() -> ForwardBackwardOutput:
        await check_session(handle, submitter.session)
        return await submitter.run_pass(ticket, bodies, "ForwardBackward")

    return submitter.start(work(), [ticket], "forward_backward_custom", timeout)


def _start_two_passes(
    submitter: Submitter, data: list[Datum], loss_fn: CustomLoss, timeout: float | None
) -> APIFuture[ForwardBackwardOutput]:
    bare = [_bare_datum(datum, index) for index, datum in enumerate(data)]
    bodies = submitter.encode_pass(bare, "cross_entropy", forward_only=True)
    context = contextvars.copy_context()
    tickets = submitter.queue.take_tickets(2)

    def answer(outputs: list[Any]) -> tuple[Evaluated, list[Parts]]:
        found = context.run(evaluate_loss, loss_fn, data, outputs)
        # Encoded on this thread, too: encoding may take as long as the loss itself.
        return found, submitter.encode_pass(_weighted(bare, found.weights), "cross_entropy")

    async def work() -> ForwardBackwardOutput:
        if isinstance(loss_fn, LossHandle):
            await check_session(loss_fn, submitter.session)
        forward = await submitter.run_pass(tickets[0], bodies, "Forward")
        with submitter.session.work.under_way():
            say("running the loss function in this process")
            found, backward = await _in_own_thread(lambda: answer(forward.loss_fn_outputs))
        output = await submitter.run_pass(tickets[1], backward, "ForwardBackward")
        return _with_loss(output, found)

    return submitter.start(work(), tickets, "forward_backward_custom", timeout)


# Requests


def _bare_datum(datum: Datum, index: int) -> Datum:
    """A copy of what the first pass needs of a datum; the caller may still change their arrays."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValidationError(
            f"datum {index} has no 'target_tokens' in its loss_fn_inputs",
            remedy="a custom loss is computed from their log-probabilities",
        )
    weights = datum.loss_fn_inputs.get("weights")
    inputs = {"target_tokens": targets, "weights": _first_weights(targets, weights)}
    return copy.deepcopy(
        Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)
    )


def _first_weights(targets: TensorData, weights: TensorData | None) -> TensorData:
    """The caller's weights, else zeros: the first pass only computes log-probabilities."""
    if weights is not None:
        return weights
    if targets.is_sparse and targets.shape is not None:
        starts = [0] * (targets.shape[0] + 1)
        return TensorData(
            [], "float32", targets.shape, sparse_crow_indices=starts, sparse_col_indices=[]
        )
    return TensorData(array.array("f", bytes(4 * len(targets.numbers))), "float32", targets.shape)


def _weighted(data: list[Datum], weights: list[Any]) -> list[Datum]:
    return [
        Datum(
            datum.model_input,
            {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weight},
            datum.model_input_spans,
            datum.loss_fn_input_spans,
        )
        for datum, weight in zip(data, weights, strict=True)
    ]


def _with_loss(output: ForwardBackwardOutput, found: Evaluated) -> ForwardBackwardOutput:
    metrics = dict(output.metrics)
    surrogate = metrics.pop("loss:sum", None)
    metrics.update(found.metrics)
    if surrogate is not None:
        metrics["surrogate_loss:sum"] = surrogate
    metrics["loss:sum"] = found.loss
    return ForwardBackwardOutput(output.loss_fn_output_type, output.loss_fn_outputs, metrics)


# The user's function


def evaluate_loss(
    loss_fn: CustomLoss, data: list[Datum], outputs: Sequence[Mapping[str, TensorData]]
) -> Evaluated:
    """Call the user's loss once with the results of the first pass.

    Raises:
        ValueError: It has no gradient for a datum, or did not return a loss.
        DecodeError: The service did not return log-probabilities for every datum.
    """
    logprobs = [output.get("logprobs") for output in outputs]
    given = [tensor for tensor in logprobs if tensor is not None]
    if len(given) != len(data) or len(logprobs) != len(data):
        raise DecodeError(
            f"the service returned logprobs of {len(given)} datums, expected {len(data)}"
        )
    if isinstance(loss_fn, GradientLoss):
        return _by_the_user(loss_fn, data, given)
    return _by_autograd(loss_fn, data, given)


def _by_autograd(
    loss_fn: TensorLoss | LossHandle, data: list[Datum], logprobs: list[TensorData]
) -> Evaluated:
    leaves = [tensor.to_torch().requires_grad_() for tensor in logprobs]
    if isinstance(loss_fn, LossHandle):
        returned: Any = evaluate(loss_fn, data, leaves)
    else:
        returned = loss_fn(data, leaves)
    loss, metrics = _pair(returned)
    loss.backward()
    missing = [index for index, leaf in enumerate(leaves) if leaf.grad is None]
    if missing:
        raise _no_gradient(missing)
    weights = [-leaf.grad for leaf in leaves if leaf.grad is not None]
    _check_finite([bool(weight.isfinite().all()) for weight in weights], loss)
    return Evaluated(float(loss.item()), weights, _numbers(metrics))


def _pair(returned: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    import torch

    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValidationError(f"a custom loss must return (loss, metrics), not {returned!r:.80}")
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValidationError(f"a custom loss must return a scalar tensor, not {loss!r:.80}")
    if not loss.requires_grad:
        raise ValidationError(
            "the loss has no gradient: it does not depend on the logprobs of any datum",
            remedy="compute it from the tensors passed in, without detach() or item()",
        )
    return loss, metrics


def _by_the_user(loss_fn: GradientLoss, data: list[Datum], logprobs: list[TensorData]) -> Evaluated:
    loss, gradients, metrics = loss_fn.gradients(data, [tensor.tolist() for tensor in logprobs])
    gradients = list(gradients)
    if len(gradients) != len(data):
        raise ValidationError(
            f"the loss returned {len(gradients)} gradients for {len(data)} datums"
        )
    missing = [index for index, gradient in enumerate(gradients) if gradient is None]
    if missing:
        raise _no_gradient(missing)
    weights = [
        _negated(gradient, tensor, index)
        for index, (gradient, tensor) in enumerate(zip(gradients, logprobs, strict=True))
    ]
    _check_finite([all(map(math.isfinite, weight.numbers.view())) for weight in weights], loss)
    return Evaluated(_number(loss), weights, _numbers(metrics))


def _negated(gradient: Any, logprobs: TensorData, index: int) -> TensorData:
    made = gradient if isinstance(gradient, TensorData) else TensorData(gradient, "float32")
    shape, wanted = _shape(made), _shape(logprobs)
    if shape != wanted:
        raise ValidationError(
            f"the gradient for datum {index} has shape {shape}, but its logprobs have {wanted}"
        )
    if made.is_sparse:
        made = TensorData(made.tolist(), "float32")
    return TensorData(
        array.array("f", [-slope for slope in made.numbers.view()]), "float32", wanted
    )


def _shape(tensor: TensorData) -> list[int]:
    return [len(tensor.numbers)] if tensor.shape is None else tensor.shape


def _no_gradient(missing: list[int]) -> ValidationError:
    return ValidationError(
        f"the loss has no gradient for datum {_named(missing)}",
        remedy="make it depend on the logprobs of every datum, even if multiplied by 0",
    )


def _named(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:10])) + (", …" if len(indices) > 10 else "")


def _check_finite(are_finite: list[bool], loss: Any) -> None:
    """Refuse NaN and infinity here: the service could only say that the weights are invalid."""
    if not all(are_finite):
        raise ValidationError(
            f"the gradient of the loss, which is {_number(loss):g}, is NaN or infinite for datum "
            + _named([index for index, is_finite in enumerate(are_finite) if not is_finite]),
            remedy="check for divisions by 0, logarithms of 0 and log-probabilities of -inf",
        )


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: _number(value) for name, value in (metrics or {}).items()}


def _number(value: Any) -> float:
    # `float()` of a tensor with a gradient warns; `item()` does not.
    return float(value.item() if hasattr(value, "item") else value)


def _require_torch() -> None:
    # Importing torch takes seconds, and the caller may be on an event loop: only look for it.
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "a custom loss function requires torch, which is not installed; "
            "run `pip install torch`, "
            "or pass an object whose gradients() method computes the gradient"
        )


# The thread of the user's function


async def _in_own_thread(work: Callable[[], T]) -> T:
    """Run user code on a new thread, so a slow loss delays no other."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as error:  # noqa: BLE001 - passed to the caller's future
            outcome = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, *outcome)

    # Not a daemon: torch aborts the process if its thread is killed while it computes.
    threading.Thread(target=run, name="tinsmith-loss", daemon=False).start()
    value, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:  # SystemExit would end the event loop's thread
        raise RuntimeError(f"the loss function raised {error!r}") from error
    return value  # type: ignore[return-value]  # set if there was no error
