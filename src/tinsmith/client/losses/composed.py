"""A custom loss as a sum of named, weighted terms, each of which can be watched.

    loss = compose_losses(
        LossTerm("policy", policy_loss),
        LossTerm("kl", kl_loss, weight=lambda step: min(0.1, 0.001 * step)),
    )
    training.forward_backward_custom(data, loss.at_step(step))

The loss is Σ weight · value over the terms, in one graph: the gradient of each term flows into the
model with the term's weight. A term whose value has lost its way back to the log-probabilities is
an error, not a silent zero.

Knows nothing of clients: what `compose_losses` returns is a function like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.types.inputs import Datum

if TYPE_CHECKING:
    import torch

    TermFn: TypeAlias = Callable[
        [list[Datum], list[torch.Tensor]],
        torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]],
    ]
else:  # `help` and signatures look up all that annotations name
    TermFn: TypeAlias = Callable[..., Any]
Weight: TypeAlias = float | Callable[[int], float]


class LossTerm(msgspec.Struct, frozen=True, weakref=True):
    """One term of a composed loss."""

    name: str
    """Names its metrics: `<name>:sum` and others, see `ComposedLoss`."""
    fn: TermFn
    """Takes what a custom loss takes; gives a scalar tensor, or that and metrics of its own."""
    weight: Weight = 1.0
    """A number, or a function that gives it for a step."""

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise ValidationError(
                f"a loss term cannot be named {self.name!r}", remedy="use a name without colons"
            )
        if not callable(self.fn):
            raise TypeError(f"term {self.name!r} needs a function, not {self.fn!r:.80}")
        if not callable(self.weight):
            _finite(self.weight, self.name)

    def weight_at(self, step: int | None) -> float:
        """The term's weight at a step.

        Raises:
            ValueError: It depends on the step, and none was given; or it is not a finite number.
        """
        if not callable(self.weight):
            return float(self.weight)
        if step is None:
            raise ValidationError(
                f"the weight of term {self.name!r} depends on the step, which is not known",
                remedy="pass loss.at_step(step) instead of loss",
            )
        return _finite(self.weight(step), self.name)


class ComposedLoss(msgspec.Struct, frozen=True, weakref=True):
    """The sum of weighted terms, for `TrainingClient.forward_backward_custom`.

    Its metrics, for each term: `<name>:sum` is the term's value before weighting,
    `<name>/weighted:sum` its part of the loss, `<name>/weight:mean` the weight. What a term's
    function reports itself is named `<name>/<metric>`.
    """

    terms: tuple[LossTerm, ...]
    step: int | None = None

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names:
            raise ValidationError("a composed loss needs at least one term")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValidationError(f"more than one term is named {', '.join(twice)}")

    def at_step(self, step: int) -> ComposedLoss:
        """The same loss with the weights of a step. Calls under way keep theirs."""
        return msgspec.structs.replace(self, step=step)

    def __call__(
        self, data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss and its metrics."""
        weights = [term.weight_at(self.step) for term in self.terms]
        needs_gradient = any(tensor.requires_grad for tensor in logprobs)
        parts: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for term, weight in zip(self.terms, weights, strict=True):
            value, own = _value(term, data, logprobs)
            if needs_gradient and weight != 0 and not value.requires_grad:
                raise ValidationError(
                    f"term {term.name!r} gives no gradient: it does not depend on the logprobs",
                    remedy="make it of the tensors passed in, without detach() or item()",
                )
            parts.append(weight * value)
            metrics.update(_metrics(term.name, value.item(), weight, own))
        return sum(parts[1:], start=parts[0]), metrics


def compose_losses(*terms: LossTerm, step: int | None = None) -> ComposedLoss:
    """Make one loss of several.

    Args:
        terms: With different names; the loss is the sum of their weighted values.
        step: For weights that depend on it; usually given later, with `at_step`.

    Raises:
        ValueError: There are no terms, or two of one name.
    """
    return ComposedLoss(terms, step)


def _value(
    term: LossTerm, data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    import torch

    returned = term.fn(data, logprobs)
    value: Any
    value, own = returned if isinstance(returned, tuple) else (returned, {})
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValidationError(
            f"term {term.name!r} must give one number as a tensor, not {value!r:.80}"
        )
    return value.reshape(()), own


def _metrics(name: str, value: float, weight: float, own: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{name}:sum": value,
        f"{name}/weighted:sum": weight * value,
        f"{name}/weight:mean": weight,
        **{
            f"{name}/{metric}": float(given.item() if hasattr(given, "item") else given)
            for metric, given in own.items()
        },
    }


def _finite(weight: Any, name: str) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError) as exc:
        raise ValidationError(f"the weight of term {name!r} is {weight!r:.80}, no number") from exc
    if not math.isfinite(number):
        raise ValidationError(f"the weight of term {name!r} is {number}, not finite")
    return number
