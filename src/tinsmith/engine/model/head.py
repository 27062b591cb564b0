"""The output layer: hidden states to log-probabilities, and their gradients back to the rows.

The logits of a whole vocabulary are large: 200 kB per row for SmolLM2 in float32. They are computed
for a slice of rows, used and dropped. The backward skips rows whose gradient is zero.
"""

# R given row, D feature, V vocabulary, K target of a row

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.model.kernels.library import Kernels, kernels_for
from tinsmith.engine.model.layers import FactorSpan, spans_of
from tinsmith.engine.model.linear import Linear
from tinsmith.engine.model.lora import LoraSpan
from tinsmith.engine.model.token_sampling import BLOCK

SLICE_BYTES = 24 << 20
"""malloc returns freed blocks of 32 MB and more to the system, and fresh memory is expensive: with
slices of 64 MB a pass over a 30M model took a tenth longer."""
MOST_TARGETS = 256
"""Maximum targets per row for the kernel, which compares each with each."""
_CACHED_ROWS = 16
"""Rows whose logits fit in cache."""
LogprobGradients = Callable[[int, int, Tensor], Tensor]
"""Given the log-probabilities of the rows `start … end`, returns dloss/dlp for each."""


class _Softmax(NamedTuple):
    """Saved for the backward: exp(logit - max), its row sums, and the softcap's gradient."""

    exp_RV: Tensor
    exp_sums_R1: Tensor
    dcap_RV: Tensor | None

    def of_rows(self, is_active_R: Tensor) -> _Softmax:
        """The active rows only."""
        dcap_RV = None if self.dcap_RV is None else self.dcap_RV[is_active_R]
        return _Softmax(self.exp_RV[is_active_R], self.exp_sums_R1[is_active_R], dcap_RV)

    def logit_gradients(self, targets_RK: Tensor, dlp_RK: Tensor) -> Tensor:
        """dloss/dlogits, given dloss/dlp; overwrites the saved tensors."""
        # dlp/dlogits is 1 at the target, minus the probabilities everywhere.
        d_RV = self.exp_RV.mul_(-dlp_RK.sum(-1, keepdim=True) / self.exp_sums_R1)
        d_RV.scatter_add_(1, targets_RK, dlp_RK)
        return d_RV if self.dcap_RV is None else d_RV.mul_(self.dcap_RV)


class _KernelSoftmax(NamedTuple):
    """The same for the kernels, which need no float32 copy of the logits."""

    kernels: Kernels
    logits_RV: Tensor
    exp_totals_R: Tensor
    max_R: Tensor

    def of_rows(self, is_active_R: Tensor) -> _KernelSoftmax:
        """The active rows only."""
        _, *kept = self
        return _KernelSoftmax(self.kernels, *(one[is_active_R] for one in kept))

    def logit_gradients(self, targets_RK: Tensor, dlp_RK: Tensor) -> Tensor:
        """dloss/dlogits, given dloss/dlp."""
        factors_R = (-dlp_RK.sum(-1) / self.exp_totals_R).float()
        given = self.max_R, factors_R
        if targets_RK.shape[1] <= MOST_TARGETS:
            return self.kernels.logit_gradients(self.logits_RV, *given, targets_RK, dlp_RK)
        none = targets_RK[:, :0], dlp_RK[:, :0]
        d_RV = self.kernels.logit_gradients(self.logits_RV.float(), *given, *none)
        return d_RV.scatter_add_(1, targets_RK, dlp_RK)


class Head:
    """The output layer of a model. `loras` are spans of the given rows."""

    def __init__(self, linear: Linear, softcap: float | None = None) -> None:
        self._linear = linear
        self._softcap = softcap
        self._slice_rows = max(1, SLICE_BYTES // (4 * linear.weight_OI.shape[0]))

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor, loras: Sequence[LoraSpan] = ()) -> Tensor:
        """All logits of a few rows, in float32 or the compute dtype."""
        return self._logits(hidden_RD, spans_of(loras, -1, "head"))

    @torch.no_grad()
    def logprobs(
        self, hidden_RD: Tensor, targets_RK: Tensor, loras: Sequence[LoraSpan] = ()
    ) -> Tensor:
        """The log-probability of each target, float32."""
        spans = spans_of(loras, -1, "head")
        found_RK = torch.empty(targets_RK.shape, device=targets_RK.device)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            logits_RV = self._logits(hidden_RD[start:end], _spans_within(spans, start, end))
            found_RK[start:end] = self._softmax(logits_RV, targets_RK[start:end])[0]
        return found_RK

    @torch.no_grad()
    def logprobs_and_gradient(
        self,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        loras: Sequence[LoraSpan],
        logprob_gradients: LogprobGradients,
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities and the gradient of the hidden states, computing logits once.

        For losses whose gradient at a token depends on that token alone. Adapters on the output
        layer accumulate their gradients.
        """
        spans = spans_of(loras, -1, "head")
        found_RK = torch.empty(targets_RK.shape, device=targets_RK.device)
        gradient_RD = torch.zeros_like(hidden_RD)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            here = slice(start, end)
            logits_RV = self._logits(hidden_RD[here], _spans_within(spans, start, end))
            found_RK[here], weights = self._softmax(logits_RV, targets_RK[here])
            dlp_RK = logprob_gradients(start, end, found_RK[here])
            self._backward_slice(
                gradient_RD[here],
                hidden_RD[here],
                targets_RK[here],
                dlp_RK,
                weights,
                _spans_within(spans, start, end),
            )
        return found_RK, gradient_RD

    @torch.no_grad()
    def backward(
        self,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        dlp_RK: Tensor,
        loras: Sequence[LoraSpan] = (),
    ) -> Tensor:
        """The gradient of the hidden states, for losses that need all log-probabilities first."""
        spans = spans_of(loras, -1, "head")
        gradient_RD = torch.zeros_like(hidden_RD)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            here = slice(start, end)
            if not dlp_RK[here].any():
                continue
            logits_RV = self._logits(hidden_RD[here], _spans_within(spans, start, end))
            _, weights = self._softmax(logits_RV, targets_RK[here])
            self._backward_slice(
                gradient_RD[here],
                hidden_RD[here],
                targets_RK[here],
                dlp_RK[here],
                weights,
                _spans_within(spans, start, end),
            )
        return gradient_RD

    def _slices(self, rows: int, spans: Sequence[FactorSpan]) -> list[tuple[int, int]]:
        """Ranges of rows that are computed together.

        A span is split only at multiples of the slice size from its own start, so that sums over
        its rows are the same wherever it lies in the batch.
        """
        marks = [0, *(mark for one in spans for mark in (one.start, one.end)), rows]
        slices: list[tuple[int, int]] = []
        for first, last in pairwise(marks):
            for start in range(first, last, self._slice_rows):
                end = min(start + self._slice_rows, last)
                fits = bool(slices) and end - slices[-1][0] <= self._slice_rows
                slices.append((slices.pop()[0] if fits else start, end))
        return slices

    def _logits(self, hidden_RD: Tensor, spans: list[FactorSpan]) -> Tensor:
        logits_RV = self._linear(hidden_RD)
        for start, end, factors in spans:
            factors.add_to(logits_RV[start:end], hidden_RD[start:end])
        if self._softcap is not None:
            logits_RV = logits_RV.float().div_(self._softcap).tanh_().mul_(self._softcap)
        return logits_RV

    def _softmax(
        self, logits_RV: Tensor, targets_RK: Tensor
    ) -> tuple[Tensor, _Softmax | _KernelSoftmax]:
        """The targets' log-probabilities and the state for the backward; overwrites the logits."""
        kernels = kernels_for(logits_RV[:, :0])
        if kernels is None or self._softcap is not None:
            logits_RV = logits_RV.float()
            dcap_RV = self._softcap_gradient(logits_RV)
            found_RK, exp_sums_R1 = _exp_in_place(logits_RV, targets_RK)
            return found_RK, _Softmax(logits_RV, exp_sums_R1, dcap_RV)
        exp_totals_R, max_R = kernels.exp_totals(logits_RV, BLOCK)
        # Bit-identical to sampling.
        logsumexp_R1 = (exp_totals_R.log() + max_R).unsqueeze(-1)
        found_RK = (logits_RV.gather(1, targets_RK) - logsumexp_R1).float()
        return found_RK, _KernelSoftmax(kernels, logits_RV, exp_totals_R, max_R)

    def _softcap_gradient(self, logits_RV: Tensor) -> Tensor | None:
        """The derivative of the capped logits."""
        return None if self._softcap is None else 1.0 - (logits_RV / self._softcap).square()

    def _backward_slice(
        self,
        gradient_RD: Tensor,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        dlp_RK: Tensor,
        weights: _Softmax | _KernelSoftmax,
        spans: list[FactorSpan],
    ) -> None:
        """Write the gradient of one slice of rows; overwrites the saved state."""
        dlp_RK = dlp_RK.to(torch.float32)
        is_active_R = (dlp_RK != 0).any(-1)
        if not bool(is_active_R.any()):
            return
        whole_RD = gradient_RD
        if not bool(is_active_R.all()):
            spans = _active_spans(spans, is_active_R)
            dlp_RK, targets_RK = dlp_RK[is_active_R], targets_RK[is_active_R]
            weights, hidden_RD = weights.of_rows(is_active_R), hidden_RD[is_active_R]
        d_RV = weights.logit_gradients(targets_RK, dlp_RK).to(hidden_RD.dtype)
        gradient_RD = self._linear.input_gradient(d_RV)
        for start, end, factors in spans:
            x_RD = hidden_RD[start:end]
            t_RR = factors.inner(x_RD)
            factors.backward(gradient_RD[start:end], d_RV[start:end], x_RD, t_RR)
        whole_RD[is_active_R] = gradient_RD


def _active_spans(spans: list[FactorSpan], is_active_R: Tensor) -> list[FactorSpan]:
    """The spans among the active rows."""
    before = [0, *is_active_R.cumsum(0).tolist()]
    moved = [FactorSpan(before[one.start], before[one.end], one.factors) for one in spans]
    return [one for one in moved if one.start < one.end]


def _exp_in_place(logits_RV: Tensor, targets_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits by exp(logit - max); the targets' log-probabilities, and the row sums."""
    found_RK, exp_sums_R1 = logits_RV.gather(1, targets_RK), logits_RV.new_empty(len(logits_RV), 1)
    # Several traversals, which take less than half the time in cache.
    for start in range(0, len(logits_RV), _CACHED_ROWS):
        here = slice(start, start + _CACHED_ROWS)
        part_RV = logits_RV[here]
        largest_R1 = part_RV.amax(-1, keepdim=True)
        exp_sums_R1[here] = _row_sums(part_RV.sub_(largest_R1).exp_())
        found_RK[here] -= largest_R1
    return found_RK.sub_(exp_sums_R1.log()), exp_sums_R1


def _row_sums(exp_RV: Tensor) -> Tensor:
    if len(exp_RV) == 1:
        # Threads would split the sum of a single row, which gives other bits than beside others.
        return exp_RV.repeat(2, 1).sum(-1, keepdim=True)[:1]
    return exp_RV.sum(-1, keepdim=True)


def _spans_within(spans: list[FactorSpan], start: int, end: int) -> list[FactorSpan]:
    """The spans within rows `start … end`, relative to `start`."""
    return [
        FactorSpan(max(one.start, start) - start, min(one.end, end) - start, one.factors)
        for one in spans
        if one.start < end and one.end > start
    ]
