"""A custom loss as a sum of named, weighted terms, each with metrics of its own.

    loss = compose_losses(
        LossTerm("policy", policy_loss),
        LossTerm("kl", kl_loss, weight=lambda step: min(0.1, 0.001 * step)),
    )
    training.forward_backward_custom(data, loss.at_step(step))

The loss is Σ weight · value over the terms, in one autograd graph, so each term's gradient is
scaled by its weight. A term whose value does not depend on the log-probabilities is an error, not a
silent zero gradient.

Knows nothing of clients: `compose_losses` returns an ordinary loss function.
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
else:  # `help` and `inspect.signature` resolve annotations
    TermFn: TypeAlias = Callable[..., Any]
Weight: TypeAlias = float | Callable[[int], float]


class LossTerm(msgspec.Struct, frozen=True, weakref=True):
    """One term of a composed loss."""

    name: str
    """The prefix of its metrics, which `ComposedLoss` lists."""
    fn: TermFn
    """Called like a custom loss; returns a scalar tensor, or a pair of that and metrics."""
    weight: Weight = 1.0
    """A number, or a function of the step that returns one."""

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise ValidationError(
                f"a loss term cannot be named {self.name!r}", remedy="use a name without colons"
            )
        if not callable(self.fn):
            raise TypeError(f"term {self.name!r} must have a function, not {self.fn!r:.80}")
        if not callable(self.weight):
            _finite(self.weight, self.name)

    def weight_at(self, step: int | None) -> float:
        """The term's weight at a step.

        Raises:
            ValueError: It depends on the step but none was given, or it is not a finite number.
        """
        if not callable(self.weight):
            return float(self.weight)
        if step is None:
            raise ValidationError(
                f"the weight of term {self.name!r} depends on the step, but no step is set",
                remedy="pass loss.at_step(step) instead of loss",
            )
        return _finite(self.weight(step), self.name)


class ComposedLoss(msgspec.Struct, frozen=True, weakref=True):
    """The sum of weighted terms, for `TrainingClient.forward_backward_custom`.

    The metrics of each term: `<name>:sum` is its unweighted value, `<name>/weighted:sum` its share
    of the loss, and `<name>/weight:mean` its weight. Metrics that the term's function returns are
    named `<name>/<metric>`.
    """

    terms: tuple[LossTerm, ...]
    step: int | None = None

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names:
            raise ValidationError("a composed loss must have at least one term")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValidationError(f"more than one term is named {', '.join(twice)}")

    def at_step(self, step: int) -> ComposedLoss:
        """The same loss with the weights of this step. Running calls keep their weights."""
        return msgspec.structs.replace(self, step=step)

    def __call__(
        self, data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss and its metrics."""
        weights = [term.weight_at(self.step) for term in self.terms]
        needs_gradient = any(tensor.requires_grad for tensor in logprobs)
        parts: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for term, weight in zip(self.terms, weights, strict=True):
            value, own = _value(term, data, logprobs)
            if needs_gradient and weight != 0 and not value.requires_grad:
                raise ValidationError(
                    f"term {term.name!r} has no gradient: it does not depend on the logprobs",
                    remedy="compute it from the tensors passed in, without detach() or item()",
                )
            parts.append(weight * value)
            metrics.update(_metrics(term.name, value.item(), weight, own))
        return sum(parts[1:], start=parts[0]), metrics


def compose_losses(*terms: LossTerm, step: int | None = None) -> ComposedLoss:
    """Combine several terms into one loss.

    Args:
        terms: The terms, with distinct names; the loss is the sum of their weighted values.
        step: The step for weights that depend on it; usually set later, with `at_step`.

    Raises:
        ValueError: There are no terms, or two have the same name.
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
        raise ValidationError(f"term {term.name!r} must return a scalar tensor, not {value!r:.80}")
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
        raise ValidationError(
            f"the weight of term {name!r} is {weight!r:.80}, not a number"
        ) from exc
    if not math.isfinite(number):
        raise ValidationError(f"the weight of term {name!r} is {number}; it must be finite")
    return number
