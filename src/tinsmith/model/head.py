"""The output layer: hidden rows to log-probabilities, and from their slopes back to the rows.

Logits of a whole vocabulary are large: 200 kB for a row of SmolLM2, in float32. They are made for a
slice of rows, used and dropped. On the way back only rows with a slope count.
"""

# R row given, D feature, V vocabulary, K target of a row

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.model.kernels.library import Kernels, kernels_for
from tinsmith.model.linear import Linear
from tinsmith.model.lora import LoraSpan
from tinsmith.model.lora_linear import FactorSpan, spans_of
from tinsmith.model.sample_tokens import BLOCK

SLICE_BYTES = 24 << 20
"""Allocators of C libraries give blocks of 32 MB and more back to the system when they are free,
and fresh memory is dear: with slices of 64 MB a pass of a 30M model took a tenth longer."""
MOST_TARGETS = 256
"""Of a row, that kernels add slopes at: they compare each with each."""
_CACHED_ROWS = 16
"""Rows that are weighed at a time: as many logits as caches hold."""
SlopesOf = Callable[[int, int, Tensor], Tensor]
"""Given the log-probabilities of the rows from start to end: how the loss changes with each."""


class _Weights(NamedTuple):
    """What a slice's rows keep for the way back: see `_weigh`."""

    weights_RV: Tensor
    sums_R1: Tensor
    bent_RV: Tensor | None

    def of_rows(self, counts_R: Tensor) -> _Weights:
        """Of those that count alone."""
        bent_RV = None if self.bent_RV is None else self.bent_RV[counts_R]
        return _Weights(self.weights_RV[counts_R], self.sums_R1[counts_R], bent_RV)

    def back(self, targets_RK: Tensor, slopes_RK: Tensor) -> Tensor:
        """What the loss changes by with each logit, given its slopes. The weights are used up."""
        # d lp / d logits is 1 at the target, less the probabilities everywhere.
        d_RV = self.weights_RV.mul_(-slopes_RK.sum(-1, keepdim=True) / self.sums_R1)
        d_RV.scatter_add_(1, targets_RK, slopes_RK)
        return d_RV if self.bent_RV is None else d_RV.mul_(self.bent_RV)


class _KernelWeights(NamedTuple):
    """The same where kernels compute it, which need no copy of the logits in float32."""

    kernels: Kernels
    logits_RV: Tensor
    totals_R: Tensor
    most_R: Tensor

    def of_rows(self, counts_R: Tensor) -> _KernelWeights:
        """`_Weights.of_rows`."""
        _, *kept = self
        return _KernelWeights(self.kernels, *(one[counts_R] for one in kept))

    def back(self, targets_RK: Tensor, slopes_RK: Tensor) -> Tensor:
        """`_Weights.back`."""
        factors_R = (-slopes_RK.sum(-1) / self.totals_R).float()
        given = self.most_R, factors_R
        if targets_RK.shape[1] <= MOST_TARGETS:
            return self.kernels.logit_slopes(self.logits_RV, *given, targets_RK, slopes_RK)
        none = targets_RK[:, :0], slopes_RK[:, :0]
        d_RV = self.kernels.logit_slopes(self.logits_RV.float(), *given, *none)
        return d_RV.scatter_add_(1, targets_RK, slopes_RK)


class Head:
    """See the top of the module. `loras` are spans of the rows that are given here."""

    def __init__(self, linear: Linear, softcap: float | None = None) -> None:
        self._linear = linear
        self._softcap = softcap
        self._slice_rows = max(1, SLICE_BYTES // (4 * linear.weight_OI.shape[0]))

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor, loras: Sequence[LoraSpan] = ()) -> Tensor:
        """All logits of the rows, in float32 or the type that is computed in.

        The caller sees to it that they are few.
        """
        return self._logits(hidden_RD, spans_of(loras, -1, "head"))

    @torch.no_grad()
    def logprobs(
        self, hidden_RD: Tensor, targets_RK: Tensor, loras: Sequence[LoraSpan] = ()
    ) -> Tensor:
        """The log-probability of each target, float32."""
        spans = spans_of(loras, -1, "head")
        found_RK = torch.empty(targets_RK.shape, device=targets_RK.device)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            logits_RV = self._logits(hidden_RD[start:end], _cut(spans, start, end))
            found_RK[start:end] = self._weighed(logits_RV, targets_RK[start:end])[0]
        return found_RK

    @torch.no_grad()
    def logprobs_and_slopes(
        self,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        loras: Sequence[LoraSpan],
        slopes_of: SlopesOf,
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities, and the gradient of the hidden rows, in one pass.

        For losses whose slope at a token follows from that token alone. Gradients of adapters on
        the output layer are gathered in them.
        """
        spans = spans_of(loras, -1, "head")
        found_RK = torch.empty(targets_RK.shape, device=targets_RK.device)
        gradient_RD = torch.zeros_like(hidden_RD)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            here = slice(start, end)
            logits_RV = self._logits(hidden_RD[here], _cut(spans, start, end))
            found_RK[here], weights = self._weighed(logits_RV, targets_RK[here])
            slopes_RK = slopes_of(start, end, found_RK[here])
            self._back(
                gradient_RD[here],
                hidden_RD[here],
                targets_RK[here],
                slopes_RK,
                weights,
                _cut(spans, start, end),
            )
        return found_RK, gradient_RD

    @torch.no_grad()
    def backward(
        self,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        slopes_RK: Tensor,
        loras: Sequence[LoraSpan] = (),
    ) -> Tensor:
        """The gradient of the hidden rows, for slopes that only all log-probabilities gave."""
        spans = spans_of(loras, -1, "head")
        gradient_RD = torch.zeros_like(hidden_RD)
        for start, end in self._slices(hidden_RD.shape[0], spans):
            here = slice(start, end)
            if not slopes_RK[here].any():
                continue
            logits_RV = self._logits(hidden_RD[here], _cut(spans, start, end))
            _, weights = self._weighed(logits_RV, targets_RK[here])
            self._back(
                gradient_RD[here],
                hidden_RD[here],
                targets_RK[here],
                slopes_RK[here],
                weights,
                _cut(spans, start, end),
            )
        return gradient_RD

    def _slices(self, rows: int, spans: Sequence[FactorSpan]) -> list[tuple[int, int]]:
        """Rows that are computed together.

        A span is cut nowhere but at multiples of the slice from its own start, so that sums over
        its rows come out the same wherever it lies.
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

    def _weighed(
        self, logits_RV: Tensor, targets_RK: Tensor
    ) -> tuple[Tensor, _Weights | _KernelWeights]:
        """The targets' log-probabilities, and what the way back needs; logits are used up."""
        kernels = kernels_for(logits_RV[:, :0])
        if kernels is None or self._softcap is not None:
            logits_RV = logits_RV.float()
            bent_RV = self._bent(logits_RV)
            found_RK, sums_R1 = _weigh(logits_RV, targets_RK)
            return found_RK, _Weights(logits_RV, sums_R1, bent_RV)
        totals_R, most_R = kernels.totals(logits_RV, BLOCK)
        # As samples get theirs, to the last bit.
        log_totals_R1 = (totals_R.log() + most_R).unsqueeze(-1)
        found_RK = (logits_RV.gather(1, targets_RK) - log_totals_R1).float()
        return found_RK, _KernelWeights(kernels, logits_RV, totals_R, most_R)

    def _bent(self, logits_RV: Tensor) -> Tensor | None:
        """How much a logit changes with what it was before the cap."""
        return None if self._softcap is None else 1.0 - (logits_RV / self._softcap).square()

    def _back(
        self,
        gradient_RD: Tensor,
        hidden_RD: Tensor,
        targets_RK: Tensor,
        slopes_RK: Tensor,
        weights: _Weights | _KernelWeights,
        spans: list[FactorSpan],
    ) -> None:
        """Write the gradient of one slice's rows. The weights are used up."""
        slopes_RK = slopes_RK.to(torch.float32)
        counts_R = (slopes_RK != 0).any(-1)
        if not bool(counts_R.any()):
            return
        whole_RD = gradient_RD
        if not bool(counts_R.all()):
            spans = _kept(spans, counts_R)
            slopes_RK, targets_RK = slopes_RK[counts_R], targets_RK[counts_R]
            weights, hidden_RD = weights.of_rows(counts_R), hidden_RD[counts_R]
        d_RV = weights.back(targets_RK, slopes_RK).to(hidden_RD.dtype)
        gradient_RD = self._linear.input_gradient(d_RV)
        for start, end, factors in spans:
            x_RD = hidden_RD[start:end]
            t_RR = factors.inner(x_RD)
            factors.backward(gradient_RD[start:end], d_RV[start:end], x_RD, t_RR)
        whole_RD[counts_R] = gradient_RD


def _kept(spans: list[FactorSpan], counts_R: Tensor) -> list[FactorSpan]:
    """The spans among the rows that count."""
    before = [0, *counts_R.cumsum(0).tolist()]
    moved = [FactorSpan(before[one.start], before[one.end], one.factors) for one in spans]
    return [one for one in moved if one.start < one.end]


def _weigh(logits_RV: Tensor, targets_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The targets' log-probabilities, and the sum of each row's weights, which replace the logits.

    A weight is e to the power of how far a logit is from the largest of its row.
    """
    found_RK, sums_R1 = logits_RV.gather(1, targets_RK), logits_RV.new_empty(len(logits_RV), 1)
    # Memory is gone over several times: in cache that takes less than half the time.
    for start in range(0, len(logits_RV), _CACHED_ROWS):
        here = slice(start, start + _CACHED_ROWS)
        part_RV = logits_RV[here]
        largest_R1 = part_RV.amax(-1, keepdim=True)
        sums_R1[here] = _row_sums(part_RV.sub_(largest_R1).exp_())
        found_RK[here] -= largest_R1
    return found_RK.sub_(sums_R1.log()), sums_R1


def _row_sums(weights_RV: Tensor) -> Tensor:
    if len(weights_RV) == 1:
        # Threads would share out the sum of a lone row, which gives other bits than beside others.
        return weights_RV.repeat(2, 1).sum(-1, keepdim=True)[:1]
    return weights_RV.sum(-1, keepdim=True)


def _cut(spans: list[FactorSpan], start: int, end: int) -> list[FactorSpan]:
    """The spans within some of the rows, counted from the first of these."""
    return [
        FactorSpan(max(one.start, start) - start, min(one.end, end) - start, one.factors)
        for one in spans
        if one.start < end and one.end > start
    ]
