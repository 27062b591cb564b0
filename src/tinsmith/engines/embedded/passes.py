"""One pass over data, from a work to its result, and the packs in which passes run together.

A `Pass` reads its work when it is made, and fails then if the data do not fit. `run_pack` computes
pieces of several passes at once: hidden rows, log-probabilities, slopes, and the way back into
gradients that each pass gathers apart. `result` tells what came of it, and the adapter is changed
by nobody but the caller, who adds a pass's gradients when all of it went well.
"""

# T row of the pack, R row whose targets are looked up, K target of a row,
# C position of all sequences of a piece

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engines.base import PassWork
from tinsmith.engines.embedded.adapters import Adapter
from tinsmith.engines.embedded.pieces import (
    Budget,
    Lookup,
    Pack,
    Piece,
    cut,
    make_examples,
    read_tokens,
)
from tinsmith.errors import TinkerError, ValidationError, without_frames
from tinsmith.model.custom_loss import CustomLoss
from tinsmith.model.lora import FusedLora, LoraSpan
from tinsmith.model.losses import Loss, TokenLoss, make_loss
from tinsmith.model.optimizer import norm_of
from tinsmith.model.pack_attention import PackAttention, Stretch
from tinsmith.model.spare_vectors import SpareVectors
from tinsmith.model.transformer import Transformer
from tinsmith.types.inputs import LossFnOutput
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardOutput


class Pass:
    """A `PassWork` under way.

    Raises:
        ValidationError: The data do not fit the model or the loss.
    """

    def __init__(
        self,
        work: PassWork,
        adapter: Adapter,
        model: Transformer,
        budget: Budget,
        spares: SpareVectors,
    ) -> None:
        shape = model.architecture
        self.work = work
        self.adapter = adapter
        self.model = model
        tokens = read_tokens(work.data, shape.vocabulary, shape.max_context)
        self.loss = _loss(work, [len(one) for one in tokens])
        targets = [one.numpy() for one in self.loss.targets.tokens]
        self.pieces = cut(make_examples(tokens, targets, shape.vocabulary), budget)
        self.error: TinkerError | None = None
        """Why it failed, if it has; its rows in a pack then have no slopes."""
        self.lp_C = torch.full((self.loss.targets.cells,), torch.nan)
        self._spares = spares
        self._lora: FusedLora | None = None
        self._gradient_norm: float | None = None

    def start(self) -> None:
        """Take the memory that it runs in, and forget what was computed before."""
        self.release()
        weights = self.adapter.weights
        gradients = self._spares.take(weights) if self.work.with_gradients else None
        self._lora = self.adapter.layout.fused(weights, self.model.dtype, gradients=gradients)
        self.lp_C.fill_(torch.nan)

    def release(self) -> None:
        """Give that memory back."""
        if self._lora is not None and self.work.with_gradients:
            self._spares.give(self._lora.gradients())
        self._lora = None

    def gather(self) -> None:
        """Add its gradients to those of the adapter, which may keep the vector; it has ended."""
        gradients, self._lora = self.lora.gradients(), None
        self.adapter.gather(gradients, self._spares, norm=self._gradient_norm)

    @property
    def lora(self) -> FusedLora:
        """The adapter as packs use it, with the gradients that this pass gathers."""
        assert self._lora is not None, "it has not started"
        return self._lora

    @property
    def scratch_bytes(self) -> int:
        """What its own gradients take."""
        return self.adapter.weights.nbytes if self.work.with_gradients else 0

    def result(self) -> ForwardBackwardOutput:
        """What is answered.

        Raises:
            TinkerError: It failed; nothing of it may be used.
        """
        if self.error is not None:
            raise self.error
        self._check_logprobs()
        evaluation = self.loss.evaluate(self.lp_C)
        if self.work.with_gradients:
            # Steps need it: one look at each number tells it, and that all are finite.
            self._gradient_norm = norm_of(self.lora.gradients())
        if self._gradient_norm is not None and not math.isfinite(self._gradient_norm):
            raise ValidationError(
                "the gradients are not finite; nothing was added to those gathered before",
                remedy="look for huge values in loss_fn_inputs, or take a lower learning rate",
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
                    f"the model gives datum {index} log-probabilities that are not finite; "
                    "nothing was added to the gradients",
                    remedy="go back to a checkpoint and take a lower learning rate",
                )


def _loss(work: PassWork, lengths: Sequence[int]) -> Loss:
    inputs = [datum.loss_fn_inputs for datum in work.data]
    if work.loss_fn != "custom":
        return make_loss(work.loss_fn, work.loss_config, inputs, lengths)
    if work.custom_loss is None:
        raise ValidationError("the loss 'custom' needs a loss_id that this session has made")
    return CustomLoss(work.custom_loss.inputs, work.custom_loss.graph, inputs, lengths)


# Packs


class _Member(NamedTuple):
    """A lookup of one pass among those of a pack."""

    owner: Pass
    piece: Piece
    lookup: Lookup
    start: int
    end: int


class _Asked(NamedTuple):
    """Targets of a pack that are looked up in one go: as many for each row, one kind of loss."""

    rows_R: Tensor
    targets_RK: Tensor
    spans: list[LoraSpan]
    members: list[_Member]


def run_pack(model: Transformer, pack: Pack[Pass], *, saves_memory: bool = False) -> None:
    """Compute all pieces of a pack; passes with and without gradients are not mixed in one."""
    with_gradients = pack.pieces[0][0].work.with_gradients
    tokens_T = _joined([piece.tokens_T for _, piece in pack.pieces], model)
    if not len(tokens_T):
        return
    positions_T = _joined([piece.positions_T for _, piece in pack.pieces], model)
    stretches, spans, starts = _layout(pack)
    with torch.set_grad_enabled(with_gradients):
        hidden_TD = model.hidden(
            tokens_T,
            positions_T,
            PackAttention(stretches),
            spans,
            saves_memory=saves_memory or pack.saves_memory,
        )
    rows_TD = hidden_TD.detach()
    slopes_TD = torch.zeros_like(rows_TD) if with_gradients else None
    for asked in _asked(pack, starts, model):
        found_RD = _look_up(model, rows_TD[asked.rows_R], asked, with_gradients)
        if slopes_TD is not None and found_RD is not None:
            slopes_TD.index_add_(0, asked.rows_R, found_RD)
    if slopes_TD is not None:
        hidden_TD.backward(slopes_TD)


def _joined(
    arrays: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]], model: Transformer
) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(model.device)


def _layout(pack: Pack[Pass]) -> tuple[list[Stretch], list[LoraSpan], list[int]]:
    """Where each piece lies in the pack, as attention and adapters are told."""
    stretches: list[Stretch] = []
    spans: list[LoraSpan] = []
    starts: list[int] = []
    row = 0
    for owner, piece in pack.pieces:
        starts.append(row)
        for start, end, prefix in piece.ranges:
            moved = None if prefix is None else (row + prefix[0], row + prefix[1])
            stretches.append(Stretch(row + start, row + end, moved))
        spans.append(LoraSpan(row, row + piece.rows, owner.lora))
        row += piece.rows
    return stretches, spans, starts


def _asked(pack: Pack[Pass], starts: Sequence[int], model: Transformer) -> list[_Asked]:
    by_kind: dict[tuple[int, bool], list[tuple[int, Pass, Piece, Lookup]]] = {}
    for row, (owner, piece) in zip(starts, pack.pieces, strict=True):
        for lookup in piece.lookups():
            kind = lookup.targets_RK.shape[1], isinstance(owner.loss, TokenLoss)
            by_kind.setdefault(kind, []).append((row, owner, piece, lookup))
    return [_gathered(found, model) for _, found in sorted(by_kind.items(), key=lambda one: one[0])]


def _gathered(found: Sequence[tuple[int, Pass, Piece, Lookup]], model: Transformer) -> _Asked:
    members: list[_Member] = []
    start = 0
    for _, owner, piece, lookup in found:
        end = start + len(lookup.rows_R)
        members.append(_Member(owner, piece, lookup, start, end))
        start = end
    return _Asked(
        _joined([row + lookup.rows_R for row, _, _, lookup in found], model),
        _joined([lookup.targets_RK for _, _, _, lookup in found], model),
        [LoraSpan(one.start, one.end, one.owner.lora) for one in members],
        members,
    )


def _look_up(
    model: Transformer, hidden_RD: Tensor, asked: _Asked, with_gradients: bool
) -> Tensor | None:
    """Note the log-probabilities; the gradient of the hidden rows, if it is wanted."""
    head, targets_RK, spans = model.head, asked.targets_RK, asked.spans
    if with_gradients and isinstance(asked.members[0].owner.loss, TokenLoss):

        def slopes_of(start: int, end: int, lp_RK: Tensor) -> Tensor:
            slopes_RK = torch.zeros_like(lp_RK)
            for one in asked.members:
                low, high = max(start, one.start), min(end, one.end)
                if low < high:
                    here = slice(low - start, high - start)
                    slopes_RK[here] = _token_slopes(one, low - one.start, lp_RK[here])
            return slopes_RK

        return head.logprobs_and_slopes(hidden_RD, targets_RK, spans, slopes_of)[1]
    lp_RK = head.logprobs(hidden_RD, targets_RK, spans)
    for one in asked.members:
        _note(one, 0, lp_RK[one.start : one.end])
    if not with_gradients:
        return None
    slopes_RK = torch.cat([_sequence_slopes(one) for one in asked.members]).to(lp_RK.device)
    return head.backward(hidden_RD, targets_RK, slopes_RK, spans)


def _note(one: _Member, first: int, lp_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the log-probabilities of some rows of a lookup: for all positions that they answer.

    Returns:
        For each of these: which of the rows answers it, its cells, their log-probabilities.
    """
    lookup = one.lookup
    low, high = np.searchsorted(lookup.row_of_C, (first, first + len(lp_RK)))
    row_of_C = torch.from_numpy(lookup.row_of_C[low:high] - first)
    cells_CK = torch.from_numpy(lookup.cells_CK[low:high])
    lp_CK = lp_RK.cpu()[row_of_C]
    one.owner.lp_C[cells_CK] = lp_CK
    return row_of_C, cells_CK, lp_CK


def _token_slopes(one: _Member, first: int, lp_RK: Tensor) -> Tensor:
    row_of_C, cells_CK, lp_CK = _note(one, first, lp_RK)
    slopes_RK = torch.zeros(lp_RK.shape)
    if one.owner.error is None:
        assert isinstance(one.owner.loss, TokenLoss)
        slopes_C = one.owner.loss.slopes(cells_CK.reshape(-1), lp_CK.reshape(-1))
        slopes_RK.index_add_(0, row_of_C, slopes_C.view(lp_CK.shape))
    return slopes_RK.to(lp_RK.device)


def _sequence_slopes(one: _Member) -> Tensor:
    """The slopes of the rows of a lookup, datum by datum."""
    slopes_RK = torch.zeros(one.lookup.targets_RK.shape)
    owner = one.owner
    slopes_C = torch.zeros_like(owner.lp_C)
    try:
        for part in one.piece.parts:
            if part.example.targets_NK.shape[1] != slopes_RK.shape[1]:
                continue  # it is in another lookup
            span = owner.loss.targets.spans[part.example.place]
            shape = owner.loss.targets.tokens[part.example.place].shape
            found = owner.loss.datum_slopes(part.example.place, owner.lp_C[span].view(shape))
            slopes_C[span] = found.reshape(-1)
    except TinkerError as exc:
        owner.error = owner.error or without_frames(exc)
        return slopes_RK
    row_of_C = torch.from_numpy(one.lookup.row_of_C)
    cells_CK = torch.from_numpy(one.lookup.cells_CK)
    return slopes_RK.index_add_(0, row_of_C, slopes_C[cells_CK])
