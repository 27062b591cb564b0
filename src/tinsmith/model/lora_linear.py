"""A frozen linear layer with adapters on some of its rows, and its way back.

The base takes no gradient: the way back gives that of the inputs, and gathers those of the factors
in the adapters themselves, so that no graph holds them.
"""

# I input, O output, R rank, T row of the pack

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.model.architecture import LinearKind
from tinsmith.model.factor_group import FactorGroup, can_group
from tinsmith.model.linear import Linear
from tinsmith.model.lora import Factors, LoraSpan


class FactorSpan(NamedTuple):
    """Rows that go through the factors of an adapter."""

    start: int
    end: int
    factors: Factors


class _GroupSpan(NamedTuple):
    """Rows that go through the factors of one adapter, or of several with as many rows each."""

    start: int
    end: int
    factors: Factors | FactorGroup


def spans_of(loras: Sequence[LoraSpan], layer: int, kind: LinearKind) -> list[FactorSpan]:
    """Where a linear layer has adapters on it."""
    found: list[FactorSpan] = []
    for start, end, lora in loras:
        factors = lora.factors(layer, kind)
        if factors is not None:
            found.append(FactorSpan(start, end, factors))
    return found


def lora_linear(x_TI: Tensor, linear: Linear, spans: list[FactorSpan]) -> Tensor:
    """The outputs; their backward pass gathers the factors' gradients where these are kept."""
    if not torch.is_grad_enabled():
        y_TO = linear(x_TI)
        for start, end, factors in spans:
            factors.add_to(y_TO[start:end], x_TI[start:end])
        return y_TO
    made: Tensor = _LoraLinear.apply(x_TI, linear, spans)  # type: ignore[no-untyped-call]
    return made


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, linear: Linear, spans: list[FactorSpan]) -> Tensor:
        y_TO = linear.of_many(x_TI)
        groups = _grouped(spans)
        ts = [factors.add_to(y_TO[start:end], x_TI[start:end]) for start, end, factors in groups]
        if groups:
            ctx.save_for_backward(x_TI, *ts)
        ctx.linear, ctx.groups = linear, groups
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, None, None]:
        dx_TI = ctx.linear.input_gradient(dy_TO)
        if ctx.groups:
            x_TI, *ts = ctx.saved_tensors
            for (start, end, factors), t_TR in zip(ctx.groups, ts, strict=True):
                factors.backward(dx_TI[start:end], dy_TO[start:end], x_TI[start:end], t_TR)
        return dx_TI, None, None


def _grouped(spans: Sequence[FactorSpan]) -> list[_GroupSpan]:
    """Neighbours as one where they can be."""
    groups: list[list[FactorSpan]] = []
    for one in spans:
        if groups and _can_join(groups[-1][-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [_GroupSpan(some[0].start, some[-1].end, _joined(some)) for some in groups]


def _can_join(last: FactorSpan, one: FactorSpan) -> bool:
    rows = one.end - one.start
    are_beside = last.end == one.start and last.end - last.start == rows
    return are_beside and can_group(last.factors, one.factors, rows)


def _joined(spans: Sequence[FactorSpan]) -> Factors | FactorGroup:
    factors = [one.factors for one in spans]
    return factors[0] if len(factors) == 1 else FactorGroup(factors)
