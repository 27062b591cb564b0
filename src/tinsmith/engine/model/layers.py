"""Layers of the transformer, forward and backward: norm, RoPE, activations, LoRA, experts.

Each is an autograd function that saves only its input for the backward; a graph of single
operations would save several times as much. Compiled kernels (`kernels/library.py`) compute them
where available, tensor operations elsewhere.

**`lora_linear`** is a frozen linear layer with adapters on some of its rows. The base weights have
no gradient. The backward returns the gradient of the inputs and accumulates those of the factors in
the adapters themselves, outside of the autograd graph.

**`FactorGroup`** has the factors of several adapters in one batched matmul, in bfloat16 by oneDNN.
For few rows the overhead of a oneDNN call exceeds the arithmetic, and oneDNN gives bit-identical
results in a batch and alone. Eight adapters of rank 16 with 16 rows each take 3.0 ms instead of 4.8
ms in two of SmolLM2's layers, forward and backward, on CPUs whose products are oneDNN's (AMX, or no
compiler). Not in float32, where calls are cheaper and threads split a single product differently
from a batch. Not with compiled kernels, whose calls cost less than stacking.

**Mixture of experts**: each token goes through the few experts that a router chooses. Experts are
frozen and have no adapters. A token's sum over its experts is computed in the order of their
indices, whatever tokens are beside it.
"""

# T row of the pack, D feature or dimension of a head, H head, F inner feature

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.model.architecture import Activation, Experts, LinearKind
from tinsmith.engine.model.kernels.library import Kernels, kernels_for
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.lora import FactorLayout, LoraFactors, LoraSpan, columns, scaled

LONE_NUMBERS = 16_384
"""Up to so many numbers PyTorch runs an activation on one thread."""
LEAST_NUMBERS = 32_768
"""From so many numbers per thread on it uses all threads."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """RMS norm over the last dimension, times the weight; the result has the given dtype."""
    if not torch.is_grad_enabled():
        return _rms_norm(x_TD, weight_D, epsilon, dtype)
    made: Tensor = _RmsNorm.apply(x_TD, weight_D, epsilon, dtype)  # type: ignore[no-untyped-call]
    return made


def add_rms_norm(
    x_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The float32 sum of both, and its RMS norm in the given dtype.

    Without gradients the sum is written in place of `x_TD`.
    """
    if added_TD is None:
        return x_TD, rms_norm(x_TD, weight_D, epsilon, dtype)
    if torch.is_grad_enabled():
        x_TD = x_TD + added_TD
        return x_TD, rms_norm(x_TD, weight_D, epsilon, dtype)
    kernels = _norm_kernels(dtype, x_TD, weight_D, added_TD)
    if kernels is not None and added_TD.dtype == dtype:
        return x_TD, kernels.rms_norm(x_TD, weight_D, epsilon, added_TD=added_TD)
    x_TD += added_TD
    return x_TD, _rms_norm(x_TD, weight_D, epsilon, dtype)


def _rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    kernels = _norm_kernels(dtype, x_TD, weight_D)
    if kernels is not None:
        return kernels.rms_norm(x_TD, weight_D, epsilon)
    return (x_TD * _scales(x_TD, epsilon)).to(dtype).mul_(weight_D)


def _norm_kernels(
    dtype: torch.dtype, x_TD: Tensor, weight_D: Tensor, *others_TD: Tensor
) -> Kernels | None:
    """The kernels, if they support these rows and this result dtype."""
    if x_TD.dim() == 1 or weight_D.dtype != dtype:
        return None
    return kernels_for(x_TD, weight_D, *others_TD)


def _scales(x_TD: Tensor, epsilon: float) -> Tensor:
    # One traversal of the memory, where squares and their mean take three.
    lengths_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=torch.float32)
    epsilon_11 = _constant(epsilon, x_TD.device)
    share = 1.0 / x_TD.shape[-1]
    return torch.addcmul(epsilon_11, lengths_T1, lengths_T1, value=share).rsqrt_()


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor, for an operation that takes tensors only."""
    with torch.inference_mode(mode=False):  # usable in training too, whoever asks first
        return torch.full((1, 1), value, device=device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.epsilon = epsilon
        return _rms_norm(x_TD, weight_D, epsilon, dtype)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None]:
        x_TD, weight_D = ctx.saved_tensors
        kernels = _norm_kernels(dy_TD.dtype, x_TD, weight_D, dy_TD)
        if kernels is not None:
            return kernels.rms_norm_backward(x_TD, weight_D, ctx.epsilon, dy_TD), None, None, None
        scales_T1 = _scales(x_TD, ctx.epsilon)
        dtype = x_TD.dtype
        dy_TD = (dy_TD * weight_D).float()
        x_TD = x_TD.float()
        shared_T1 = torch.linalg.vecdot(dy_TD, x_TD).unsqueeze(-1)
        shared_T1 = shared_T1 * scales_T1.square() / x_TD.shape[-1]
        dx_TD = torch.addcmul(dy_TD, x_TD, shared_T1, value=-1.0).mul_(scales_T1)
        return dx_TD.to(dtype), None, None, None


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary position embedding.

    Args:
        x_THD: Any number of heads.
        cos_T1D: float32, the same for all heads.
        sin_T1D: Likewise, negated in the first half.
    """
    if not torch.is_grad_enabled():
        return _rope(x_THD, cos_T1D, sin_T1D)
    made: Tensor = _Rope.apply(x_THD, cos_T1D, sin_T1D)  # type: ignore[no-untyped-call]
    return made


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rope(x_THD, cos_T1D, sin_T1D)

    @staticmethod
    def backward(ctx: Any, dy_THD: Tensor) -> tuple[Tensor, None, None]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rope(dy_THD, cos_T1D, -sin_T1D), None, None


def _rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    kernels = kernels_for(x_THD, cos_T1D, sin_T1D)
    if kernels is not None:
        return kernels.rope(x_THD, cos_T1D, sin_T1D)
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return (x_THD * cos_T1D).addcmul_(swapped_THD, sin_T1D).to(x_THD.dtype)


def gated_activation(gate_up_TF: Tensor, activation: Activation) -> Tensor:
    """The activation of the first half of the columns, times the second half."""
    if not torch.is_grad_enabled():
        return _gate(gate_up_TF, activation)
    made: Tensor = _Gated.apply(gate_up_TF, activation)  # type: ignore[no-untyped-call]
    return made


def _gate(gate_up_TF: Tensor, activation: Activation) -> Tensor:
    kernels = kernels_for(gate_up_TF)
    if kernels is not None:
        return kernels.gate(gate_up_TF, is_gelu=activation == "gelu_tanh")
    gate_TF, up_TF = gate_up_TF.chunk(2, -1)
    return _activated(gate_TF, activation).mul_(up_TF)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        ctx.activation = activation
        return _gate(gate_up_TF, activation)

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,) = ctx.saved_tensors
        kernels = kernels_for(gate_up_TF, dy_TF)
        if kernels is not None:
            is_gelu = ctx.activation == "gelu_tanh"
            return kernels.gate_backward(gate_up_TF, dy_TF, is_gelu=is_gelu), None
        gate_TF, up_TF = gate_up_TF.chunk(2, -1)
        d_TF = torch.empty_like(gate_up_TF)
        inner = gate_TF.shape[-1]
        torch.mul(dy_TF, _activated(gate_TF, ctx.activation), out=d_TF[..., inner:])
        backward = _ACTIVATION_BACKWARD[ctx.activation]
        d_TF[..., :inner] = _in_whole_rows(backward, dy_TF * up_TF, gate_TF)
        return d_TF, None


_ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_ACTIVATION_BACKWARD: dict[Activation, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


def _activated(x_TF: Tensor, activation: Activation) -> Tensor:
    return _in_whole_rows(_ACTIVATIONS[activation], x_TF)


def _in_whole_rows(operation: Callable[..., Tensor], *given_TF: Tensor) -> Tensor:
    """An elementwise operation, in blocks of rows that threads divide at row boundaries.

    Activations compute the tail of a thread's share with other instructions than the rest. If a
    share ended within a row, the row's bits would depend on the number of rows.
    """
    sizes = _block_sizes(given_TF[0])
    if len(sizes) == 1:
        return operation(*given_TF)
    parts = zip(*(one.split(sizes) for one in given_TF), strict=True)
    return torch.cat([operation(*some) for some in parts])


def _block_sizes(x_TF: Tensor) -> list[int]:
    rows, threads = x_TF.shape[0], torch.get_num_threads()
    if threads == 1 or x_TF.numel() <= LONE_NUMBERS or x_TF.device.type != "cpu":
        return [rows]
    columns = x_TF.numel() // rows
    even = rows - rows % threads
    if even * columns < threads * LEAST_NUMBERS:  # fewer threads might divide it within rows
        even = 0
    alone = max(1, LONE_NUMBERS // columns)
    blocks, last = divmod(rows - even, alone)
    return [one for one in (even, *[alone] * blocks, last) if one]


MOST_SMALL = 16**3
"""Up to so many multiplications PyTorch computes itself. It counts those of the whole batch, so
small products would differ between a batch and alone."""


def can_group(one: LoraFactors, other: LoraFactors, rows: int) -> bool:
    """Whether both can share a batched matmul with bit-identical results."""
    if one.kernel_lora is not None or other.kernel_lora is not None:
        return False
    place = one.place
    narrowest = min(place.inputs, *place.outputs)
    # With rank 1 these are matrix-vector products, which are summed differently.
    is_large = place.rank > 1 and rows * place.rank * narrowest > MOST_SMALL
    is_same = (one.dtype, _shape(place)) == (other.dtype, _shape(other.place))
    return one.dtype == torch.bfloat16 and is_large and is_same


def _shape(place: FactorLayout) -> tuple[int, list[int], int]:
    return place.inputs, place.outputs, place.rank


class FactorGroup:
    """Several adapters on equally many consecutive rows each.

    Args:
        members: Their factors, all of one shape.
    """

    def __init__(self, members: Sequence[LoraFactors]) -> None:
        self._members = members
        self._place = members[0].place
        held = zip(*(one.held for one in members), strict=True)
        self._a_GRI, *self._bs_GOR = [_stacked(some, members[0].dtype) for some in held]

    def inner(self, x_TI: Tensor) -> Tensor:
        """`LoraFactors.inner`."""
        return scaled(torch.bmm(self._rows(x_TI), self._a_GRI.mT), self._place.scale)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`LoraFactors.add_to`."""
        t_GTR = self.inner(x_TI)
        ys, ts = columns(self._rows(y_TO), self._place.outputs), columns(t_GTR, self._place.ranks)
        for y, t, b_GOR in zip(ys, ts, self._bs_GOR, strict=True):
            y.baddbmm_(t, b_GOR.mT)
        return t_GTR

    def backward(self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_GTR: Tensor) -> None:
        """`LoraFactors.backward`."""
        # Copied once, since each product would copy a non-contiguous operand.
        dys = [dy.contiguous() for dy in columns(self._rows(dy_TO), self._place.outputs)]
        dts = [torch.bmm(dy, b_GOR) for dy, b_GOR in zip(dys, self._bs_GOR, strict=True)]
        dt_GTR = scaled(torch.cat(dts, -1), self._place.scale)
        self._rows(dx_TI).baddbmm_(dt_GTR, self._a_GRI)
        lefts, rights = (dt_GTR, *dys), (self._rows(x_TI), *columns(t_GTR, self._place.ranks))
        made = [torch.bmm(one.mT, other) for one, other in zip(lefts, rights, strict=True)]
        for member, *gradients in zip(self._members, *made, strict=True):
            member.accumulate(gradients)

    def _rows(self, rows: Tensor) -> Tensor:
        return rows.view(len(self._members), -1, rows.shape[-1])


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    shape = len(matrices), *matrices[0].shape
    made = torch.empty(shape, dtype=dtype, device=matrices[0].device)
    for place, one in zip(made, matrices, strict=True):
        place.copy_(one)
    return made


class FactorSpan(NamedTuple):
    """Rows that go through the factors of an adapter."""

    start: int
    end: int
    factors: LoraFactors


class _GroupSpan(NamedTuple):
    """Rows that go through one adapter, or through several with equally many rows each."""

    start: int
    end: int
    factors: LoraFactors | FactorGroup


def spans_of(loras: Sequence[LoraSpan], layer: int, kind: LinearKind) -> list[FactorSpan]:
    """The spans of a linear layer that have adapters."""
    found: list[FactorSpan] = []
    for start, end, lora in loras:
        factors = lora.factors(layer, kind)
        if factors is not None:
            found.append(FactorSpan(start, end, factors))
    return found


def lora_linear(x_TI: Tensor, linear: Linear, spans: list[FactorSpan]) -> Tensor:
    """The layer's outputs with adapters; the backward accumulates the factors' gradients."""
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
        y_TO = linear.for_many_rows(x_TI)
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
    """Adjacent spans as groups, where they can be computed together."""
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


def _joined(spans: Sequence[FactorSpan]) -> LoraFactors | FactorGroup:
    factors = [one.factors for one in spans]
    return factors[0] if len(factors) == 1 else FactorGroup(factors)


_LEAST_GATE = -80.0
"""Lower bound of the gate's logit, below which exp overflows."""


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The router and the experts of one layer."""

    shape: Experts
    router: Linear
    gate_ups: tuple[Linear, ...]
    downs: tuple[Linear, ...]
    shared_gate: Linear | None = None
    """The gate of the shared expert."""


def mix_experts(
    x_TD: Tensor, weights: ExpertWeights, activation: Activation, shared_TD: Tensor | None
) -> Tensor:
    """The weighted outputs of the chosen experts, plus the gated shared expert."""
    probs_TE = lora_linear(x_TD, weights.router, []).float().softmax(-1)
    probs_TC, chosen_TC = probs_TE.topk(weights.shape.chosen, dim=-1)
    if weights.shape.normalises:
        probs_TC = probs_TC / probs_TC.sum(-1, keepdim=True)
    mixed_TD = torch.zeros_like(x_TD)
    for expert in chosen_TC.unique().tolist():
        rows_N, places_N = torch.nonzero(chosen_TC == expert, as_tuple=True)
        gate_up_NF = lora_linear(x_TD[rows_N], weights.gate_ups[expert], [])
        out_ND = lora_linear(gated_activation(gate_up_NF, activation), weights.downs[expert], [])
        probs_N1 = probs_TC[rows_N, places_N].unsqueeze(1)
        mixed_TD = mixed_TD.index_add(0, rows_N, (out_ND * probs_N1).to(x_TD.dtype))
    if shared_TD is None:
        return mixed_TD
    if weights.shared_gate is not None:
        # Not `sigmoid`, which computes the tail of a tensor with other instructions.
        gate_T1 = lora_linear(x_TD, weights.shared_gate, []).clamp(min=_LEAST_GATE)
        shared_TD = shared_TD / (1 + torch.exp(-gate_T1))
    return mixed_TD + shared_TD
