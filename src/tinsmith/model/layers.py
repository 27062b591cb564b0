"""The small steps between a transformer's matrices, each with its way back.

Norms, turned positions and gated activations are written as functions with gradients of their own:
what they keep for the way back is what came in, where a graph of single operations would keep
several times as much. Where there are compiled kernels (`kernels/library.py`) these compute them;
elsewhere it is done by operations on whole tensors, each of which goes over the memory once more.
"""

# T row of the pack, D feature or dimension of a head, H head, F inner feature

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.model.architecture import Activation
from tinsmith.model.kernels.library import Kernels, kernels_for

LONE_NUMBERS = 16_384
"""On so many numbers PyTorch has one thread do any activation."""
LEAST_NUMBERS = 32_768
"""And on so many for each thread it has all threads do it."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Rows over the root of their mean square, times the weight, in a type of the caller's.

    Any shape before the last.
    """
    if not torch.is_grad_enabled():
        return _normed(x_TD, weight_D, epsilon, dtype)
    made: Tensor = _RmsNorm.apply(x_TD, weight_D, epsilon, dtype)  # type: ignore[no-untyped-call]
    return made


def added_and_normed(
    x_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum of both, float32 as the first is, and its norm, in a type of the caller's.

    Without gradients the sum takes the place of the first.
    """
    if added_TD is None:
        return x_TD, rms_norm(x_TD, weight_D, epsilon, dtype)
    if torch.is_grad_enabled():
        x_TD = x_TD + added_TD
        return x_TD, rms_norm(x_TD, weight_D, epsilon, dtype)
    kernels = _norm_kernels(dtype, x_TD, weight_D, added_TD)
    if kernels is not None and added_TD.dtype == dtype:
        return x_TD, kernels.norm(x_TD, weight_D, epsilon, added_TD=added_TD)
    x_TD += added_TD
    return x_TD, _normed(x_TD, weight_D, epsilon, dtype)


def _normed(x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    kernels = _norm_kernels(dtype, x_TD, weight_D)
    if kernels is not None:
        return kernels.norm(x_TD, weight_D, epsilon)
    return (x_TD * _scales(x_TD, epsilon)).to(dtype).mul_(weight_D)


def _norm_kernels(
    dtype: torch.dtype, x_TD: Tensor, weight_D: Tensor, *others_TD: Tensor
) -> Kernels | None:
    """The kernels, if they norm such rows, to such a type."""
    if x_TD.dim() == 1 or weight_D.dtype != dtype:
        return None
    return kernels_for(x_TD, weight_D, *others_TD)


def _scales(x_TD: Tensor, epsilon: float) -> Tensor:
    # A norm is one pass over the memory, where squares and their mean are three.
    lengths_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=torch.float32)
    epsilon_11 = _constant(epsilon, x_TD.device)
    share = 1.0 / x_TD.shape[-1]
    return torch.addcmul(epsilon_11, lengths_T1, lengths_T1, value=share).rsqrt_()


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A number where one operation takes tensors alone and would else be three."""
    with torch.inference_mode(mode=False):  # for passes with gradients too, whoever asks first
        return torch.full((1, 1), value, device=device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.epsilon = epsilon
        return _normed(x_TD, weight_D, epsilon, dtype)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None]:
        x_TD, weight_D = ctx.saved_tensors
        kernels = _norm_kernels(dy_TD.dtype, x_TD, weight_D, dy_TD)
        if kernels is not None:
            return kernels.norm_back(x_TD, weight_D, ctx.epsilon, dy_TD), None, None, None
        scales_T1 = _scales(x_TD, ctx.epsilon)
        dtype = x_TD.dtype
        dy_TD = (dy_TD * weight_D).float()
        x_TD = x_TD.float()
        shared_T1 = torch.linalg.vecdot(dy_TD, x_TD).unsqueeze(-1)
        shared_T1 = shared_T1 * scales_T1.square() / x_TD.shape[-1]
        dx_TD = torch.addcmul(dy_TD, x_TD, shared_T1, value=-1.0).mul_(scales_T1)
        return dx_TD.to(dtype), None, None, None


def turned(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Heads turned by their rows' positions.

    Args:
        x_THD: Any number of heads.
        cos_T1D: For each dimension; of all heads; float32.
        sin_T1D: Likewise, negative in the first half.
    """
    if not torch.is_grad_enabled():
        return _turn(x_THD, cos_T1D, sin_T1D)
    made: Tensor = _Turned.apply(x_THD, cos_T1D, sin_T1D)  # type: ignore[no-untyped-call]
    return made


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _turn(x_THD, cos_T1D, sin_T1D)

    @staticmethod
    def backward(ctx: Any, dy_THD: Tensor) -> tuple[Tensor, None, None]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _turn(dy_THD, cos_T1D, -sin_T1D), None, None


def _turn(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    kernels = kernels_for(x_THD, cos_T1D, sin_T1D)
    if kernels is not None:
        return kernels.turn(x_THD, cos_T1D, sin_T1D)
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return (x_THD * cos_T1D).addcmul_(swapped_THD, sin_T1D).to(x_THD.dtype)


def gated(gate_up_TF: Tensor, activation: Activation) -> Tensor:
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
            return kernels.gate_back(gate_up_TF, dy_TF, is_gelu=is_gelu), None
        gate_TF, up_TF = gate_up_TF.chunk(2, -1)
        d_TF = torch.empty_like(gate_up_TF)
        inner = gate_TF.shape[-1]
        torch.mul(dy_TF, _activated(gate_TF, ctx.activation), out=d_TF[..., inner:])
        backward = _SLOPES[ctx.activation]
        d_TF[..., :inner] = _in_whole_rows(backward, dy_TF * up_TF, gate_TF)
        return d_TF, None


_ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_SLOPES: dict[Activation, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


def _activated(x_TF: Tensor, activation: Activation) -> Tensor:
    return _in_whole_rows(_ACTIVATIONS[activation], x_TF)


def _in_whole_rows(operation: Callable[..., Tensor], *given_TF: Tensor) -> Tensor:
    """An operation on each number, in blocks of rows that threads share out by whole rows.

    Activations compute the last numbers of a thread's share in another way than the others. Where
    a share ended within a row, its bits would follow from how many rows there are.
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
    if even * columns < threads * LEAST_NUMBERS:  # fewer might share it, and not by whole rows
        even = 0
    alone = max(1, LONE_NUMBERS // columns)
    blocks, last = divmod(rows - even, alone)
    return [one for one in (even, *[alone] * blocks, last) if one]
