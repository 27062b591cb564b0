"""One training pass, from a work to its result, and packed batches of several passes.

A `TrainingPass` validates its work when it is created. `run_packed_batch` computes micro-batches of
several passes at once: hidden states, log-probabilities, their gradients, and the backward pass,
whose gradients each pass accumulates separately. Only the caller changes the adapter: it adds a
pass's gradients once all of it has succeeded.
"""

# T row of the batch, R row whose targets are looked up, K target of a row,
# C position of all sequences of a micro-batch

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import PassWork
from tinsmith.engine.embedded.adapter_state import AdapterState
from tinsmith.engine.embedded.micro_batches import (
    MicroBatch,
    PackedBatch,
    RowBudget,
    TargetLookup,
    make_examples,
    read_tokens,
    split_examples,
)
from tinsmith.engine.model.graph_loss import GraphLoss
from tinsmith.engine.model.lora import FusedLora, LoraSpan
from tinsmith.engine.model.losses import Loss, TokenLoss, make_loss
from tinsmith.engine.model.optimizer import VectorPool, norm_of
from tinsmith.engine.model.packed_attention import PackedAttention, PackedSegment
from tinsmith.engine.model.transformer import Transformer
from tinsmith.errors import TinkerError, ValidationError, without_frames
from tinsmith.types.inputs import LossFnOutput
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardOutput


class TrainingPass:
    """A running `PassWork`.

    Raises:
        ValidationError: The data are invalid for the model or the loss.
    """

    def __init__(
        self,
        work: PassWork,
        adapter: AdapterState,
        model: Transformer,
        budget: RowBudget,
        pool: VectorPool,
    ) -> None:
        shape = model.architecture
        self.work = work
        self.adapter = adapter
        self.model = model
        tokens = read_tokens(work.data, shape.vocabulary, shape.max_context)
        self.loss = _loss(work, [len(one) for one in tokens])
        targets = [one.numpy() for one in self.loss.targets.tokens]
        self.micro_batches = split_examples(
            make_examples(tokens, targets, shape.vocabulary), budget
        )
        self.error: TinkerError | None = None
        """Why it failed, if it has; its rows in a batch then have zero gradients."""
        self.lp_C = torch.full((self.loss.targets.cells,), torch.nan)
        self._pool = pool
        self._lora: FusedLora | None = None
        self._gradient_norm: float | None = None

    def start(self) -> None:
        """Allocate its gradients, and discard earlier results."""
        self.release()
        weights = self.adapter.weights
        gradients = self._pool.take(weights) if self.work.with_gradients else None
        self._lora = self.adapter.layout.fused(weights, self.model.dtype, gradients=gradients)
        self.lp_C.fill_(torch.nan)

    def release(self) -> None:
        """Return the gradients to the pool."""
        if self._lora is not None and self.work.with_gradients:
            self._pool.give(self._lora.gradients())
        self._lora = None

    def accumulate(self) -> None:
        """Add its gradients to the adapter, which may take over the vector."""
        gradients, self._lora = self.lora.gradients(), None
        self.adapter.accumulate(gradients, self._pool, norm=self._gradient_norm)

    @property
    def lora(self) -> FusedLora:
        """The adapter, with the gradients that this pass accumulates."""
        assert self._lora is not None, "it has not started"
        return self._lora

    @property
    def gradient_bytes(self) -> int:
        """Size of its separate gradients."""
        return self.adapter.weights.nbytes if self.work.with_gradients else 0

    def result(self) -> ForwardBackwardOutput:
        """The result.

        Raises:
            TinkerError: It failed; its gradients must not be used.
        """
        if self.error is not None:
            raise self.error
        self._check_logprobs()
        evaluation = self.loss.evaluate(self.lp_C)
        if self.work.with_gradients:
            # The optimizer step needs it, and it also shows whether all are finite.
            self._gradient_norm = norm_of(self.lora.gradients())
        if self._gradient_norm is not None and not math.isfinite(self._gradient_norm):
            raise ValidationError(
                "the gradients are not finite; none were accumulated",
                remedy="check loss_fn_inputs for huge values, or lower the learning rate",
            )
        outputs: list[LossFnOutput] = []
        targets = self.loss.targets
        for tokens, span in zip(targets.tokens, targets.spans, strict=True):
            logprobs = self.lp_C[span].reshape(tokens.shape).numpy()
            outputs.append({"logprobs": TensorData.from_numpy(logprobs)})
        return ForwardBackwardOutput("ArrayRecord", outputs, evaluation.metrics)

    def _check_logprobs(self) -> None:
        if bool(self.lp_C.isfinite().all()):
            return
        for index, span in enumerate(self.loss.targets.spans):
            if not bool(self.lp_C[span].isfinite().all()):
                raise ValidationError(
                    f"the model's log-probabilities of datum {index} are not finite; "
                    "no gradients were accumulated",
                    remedy="restart from a checkpoint with a lower learning rate",
                )


def _loss(work: PassWork, lengths: Sequence[int]) -> Loss:
    inputs = [datum.loss_fn_inputs for datum in work.data]
    if work.loss_fn != "custom":
        return make_loss(work.loss_fn, work.loss_config, inputs, lengths)
    if work.custom_loss is None:
        raise ValidationError(
            "the loss 'custom' needs the loss_id of an uploaded loss of this session"
        )
    return GraphLoss(work.custom_loss.inputs, work.custom_loss.graph, inputs, lengths)


# Packed batches


class _Member(NamedTuple):
    """A lookup of one pass within a batch."""

    owner: TrainingPass
    micro_batch: MicroBatch
    lookup: TargetLookup
    start: int
    end: int


class _TargetGroup(NamedTuple):
    """Targets of a batch that are looked up together: equally many per row, one kind of loss."""

    rows_R: Tensor
    targets_RK: Tensor
    spans: list[LoraSpan]
    members: list[_Member]


def run_packed_batch(
    model: Transformer, batch: PackedBatch[TrainingPass], *, recomputes: bool = False
) -> None:
    """Compute all micro-batches of a batch, all of them with or all without gradients."""
    with_gradients = batch.micro_batches[0][0].work.with_gradients
    tokens_T = _concatenated(
        [micro_batch.tokens_T for _, micro_batch in batch.micro_batches], model
    )
    if not len(tokens_T):
        return
    positions_T = _concatenated(
        [micro_batch.positions_T for _, micro_batch in batch.micro_batches], model
    )
    segments, spans, starts = _layout(batch)
    with torch.set_grad_enabled(with_gradients):
        hidden_TD = model.forward(
            tokens_T,
            positions_T,
            PackedAttention(segments),
            spans,
            recomputes=recomputes or batch.recomputes,
        )
    rows_TD = hidden_TD.detach()
    dhidden_TD = torch.zeros_like(rows_TD) if with_gradients else None
    for group in _target_groups(batch, starts, model):
        found_RD = _look_up(model, rows_TD[group.rows_R], group, with_gradients)
        if dhidden_TD is not None and found_RD is not None:
            dhidden_TD.index_add_(0, group.rows_R, found_RD)
    if dhidden_TD is not None:
        hidden_TD.backward(dhidden_TD)


def _concatenated(
    arrays: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]], model: Transformer
) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(model.device)


def _layout(
    batch: PackedBatch[TrainingPass],
) -> tuple[list[PackedSegment], list[LoraSpan], list[int]]:
    """The segments, LoRA spans and start of each micro-batch in the batch."""
    segments: list[PackedSegment] = []
    spans: list[LoraSpan] = []
    starts: list[int] = []
    row = 0
    for owner, micro_batch in batch.micro_batches:
        starts.append(row)
        for start, end, prefix in micro_batch.ranges:
            moved = None if prefix is None else (row + prefix[0], row + prefix[1])
            segments.append(PackedSegment(row + start, row + end, moved))
        spans.append(LoraSpan(row, row + micro_batch.rows, owner.lora))
        row += micro_batch.rows
    return segments, spans, starts


def _target_groups(
    batch: PackedBatch[TrainingPass], starts: Sequence[int], model: Transformer
) -> list[_TargetGroup]:
    by_kind: dict[tuple[int, bool], list[tuple[int, TrainingPass, MicroBatch, TargetLookup]]] = {}
    for row, (owner, micro_batch) in zip(starts, batch.micro_batches, strict=True):
        for lookup in micro_batch.lookups():
            kind = lookup.targets_RK.shape[1], isinstance(owner.loss, TokenLoss)
            by_kind.setdefault(kind, []).append((row, owner, micro_batch, lookup))
    return [
        _target_group(found, model) for _, found in sorted(by_kind.items(), key=lambda one: one[0])
    ]


def _target_group(
    found: Sequence[tuple[int, TrainingPass, MicroBatch, TargetLookup]], model: Transformer
) -> _TargetGroup:
    members: list[_Member] = []
    start = 0
    for _, owner, micro_batch, lookup in found:
        end = start + len(lookup.rows_R)
        members.append(_Member(owner, micro_batch, lookup, start, end))
        start = end
    return _TargetGroup(
        _concatenated([row + lookup.rows_R for row, _, _, lookup in found], model),
        _concatenated([lookup.targets_RK for _, _, _, lookup in found], model),
        [LoraSpan(one.start, one.end, one.owner.lora) for one in members],
        members,
    )


def _look_up(
    model: Transformer, hidden_RD: Tensor, group: _TargetGroup, with_gradients: bool
) -> Tensor | None:
    """Store the log-probabilities; returns the gradient of the hidden states, if wanted."""
    head, targets_RK, spans = model.head, group.targets_RK, group.spans
    if with_gradients and isinstance(group.members[0].owner.loss, TokenLoss):

        def logprob_gradients(start: int, end: int, lp_RK: Tensor) -> Tensor:
            dlp_RK = torch.zeros_like(lp_RK)
            for one in group.members:
                low, high = max(start, one.start), min(end, one.end)
                if low < high:
                    here = slice(low - start, high - start)
                    dlp_RK[here] = _token_gradients(one, low - one.start, lp_RK[here])
            return dlp_RK

        return head.logprobs_and_gradient(hidden_RD, targets_RK, spans, logprob_gradients)[1]
    lp_RK = head.logprobs(hidden_RD, targets_RK, spans)
    for one in group.members:
        _store_logprobs(one, 0, lp_RK[one.start : one.end])
    if not with_gradients:
        return None
    dlp_RK = torch.cat([_sequence_gradients(one) for one in group.members]).to(lp_RK.device)
    return head.backward(hidden_RD, targets_RK, dlp_RK, spans)


def _store_logprobs(one: _Member, first: int, lp_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Store the log-probabilities of some rows of a lookup, for all positions that use them.

    Returns:
        For each position: its row, its cells, their log-probabilities.
    """
    lookup = one.lookup
    low, high = np.searchsorted(lookup.row_of_C, (first, first + len(lp_RK)))
    row_of_C = torch.from_numpy(lookup.row_of_C[low:high] - first)
    cells_CK = torch.from_numpy(lookup.cells_CK[low:high])
    lp_CK = lp_RK.cpu()[row_of_C]
    one.owner.lp_C[cells_CK] = lp_CK
    return row_of_C, cells_CK, lp_CK


def _token_gradients(one: _Member, first: int, lp_RK: Tensor) -> Tensor:
    row_of_C, cells_CK, lp_CK = _store_logprobs(one, first, lp_RK)
    dlp_RK = torch.zeros(lp_RK.shape)
    if one.owner.error is None:
        assert isinstance(one.owner.loss, TokenLoss)
        dlp_C = one.owner.loss.gradients(cells_CK.reshape(-1), lp_CK.reshape(-1))
        dlp_RK.index_add_(0, row_of_C, dlp_C.view(lp_CK.shape))
    return dlp_RK.to(lp_RK.device)


def _sequence_gradients(one: _Member) -> Tensor:
    """dloss/dlp of the rows of a lookup, datum by datum."""
    dlp_RK = torch.zeros(one.lookup.targets_RK.shape)
    owner = one.owner
    dlp_C = torch.zeros_like(owner.lp_C)
    try:
        for part in one.micro_batch.parts:
            if part.example.targets_NK.shape[1] != dlp_RK.shape[1]:
                continue  # it is in another lookup
            span = owner.loss.targets.spans[part.example.place]
            shape = owner.loss.targets.tokens[part.example.place].shape
            found = owner.loss.datum_gradients(part.example.place, owner.lp_C[span].view(shape))
            dlp_C[span] = found.reshape(-1)
    except TinkerError as exc:
        owner.error = owner.error or without_frames(exc)
        return dlp_RK
    row_of_C = torch.from_numpy(one.lookup.row_of_C)
    cells_CK = torch.from_numpy(one.lookup.cells_CK)
    return dlp_RK.index_add_(0, row_of_C, dlp_C[cells_CK])
