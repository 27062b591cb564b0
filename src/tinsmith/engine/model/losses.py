"""The losses: from log-probabilities to their sum, gradients and metrics.

With lp the log-probability that the model gives a target, w, A and q the datum's `weights`,
`advantages` and `logprobs`, and r = exp(lp − q), each is a sum over all cells (see
`loss_inputs.py`) of

    cross_entropy         −w·lp
    importance_sampling   −r·A
    ppo                   −min(r·A, clip(r)·A)           clip to 0.8 … 1.2
    cispo                 −clip(r)·lp·A                  clip to 0 … 4, not differentiated
    dro                   −(lp·A − ½·beta·(lp − q)²)     beta 0.05
    gspo                  −min(s·A, clip(s)·A)           clip to 0.8 … 1.2
    stable_reinforce      −clip(r)·A + ½·kl_coeff·(lp − q)²    no clip, kl_coeff 0

The numbers on the right are defaults; the configuration overrides them, and for thresholds an input
of that name does. In gspo s = exp(mean(lp − q)) is the ratio of the whole datum, over the cells of
`sequence_ratio_mask`, or else over those with an advantage. docs/losses.md says which parts are
published and which are our choice.

Use, for one pass over the data of one work:

    loss = make_loss(name, config, [datum.loss_fn_inputs for datum in data])
    loss.targets.tokens[i]            # the tokens whose log-probabilities are needed
    loss.targets.spans[i]             # the cells of datum i
    if isinstance(loss, TokenLoss):   # any cells, as soon as their log-probabilities are known
        dlp = loss.gradients(slice(start, end), lp[start:end])
    else:                             # gspo, custom: a whole datum at a time
        dlp = loss.datum_gradients(i, lp[loss.targets.spans[i]])
    total, metrics = loss.evaluate(lp)   # when all are known; raises if a number is not finite

Gradients are dloss/dlp, float32, without autograd, and do not depend on how the cells are sliced.
One that is not finite is returned as 0: `evaluate` fails the work, and works that share its packed
batch must not be affected. `metrics` are named `name:reduction` and include `loss:sum`; each can be
combined over chunks of a batch to its value for the whole batch.
"""

# C cell, D datum

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.model.loss_inputs import (
    CellInputs,
    Cells,
    Config,
    ExampleRows,
    Inputs,
    Targets,
    number_setting,
    read_targets,
)
from tinsmith.errors import ValidationError
from tinsmith.observe import training_metrics

LARGEST_LOG_RATIO = 80.0
"""Far beyond any sensible ratio, while its exponential still fits into float32, so 0 · r is 0."""


class Evaluation(NamedTuple):
    """The result of a pass."""

    loss: float
    metrics: dict[str, float]


class Loss(abc.ABC):
    """A loss over the data of one pass. Not reusable for another pass."""

    targets: Targets

    @abc.abstractmethod
    def datum_gradients(self, index: int, lp: Tensor) -> Tensor:
        """dloss/dlp of one datum, in the shape of its log-probabilities."""

    @abc.abstractmethod
    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """The loss and the metrics, from the log-probabilities of all cells.

        Raises:
            ValidationError: A log-probability, the loss or a gradient is not finite.
        """


def make_loss(
    name: str, config: Config, data: Sequence[Inputs], lengths: Sequence[int] | None = None
) -> Loss:
    """Create one of the built-in losses; `graph_loss.py` has uploaded ones.

    Args:
        name: Its name in the API.
        config: Its settings.
        data: The `loss_fn_inputs` of each datum.
        lengths: The number of positions of each datum, to check the targets against.

    Raises:
        ValidationError: There is no such loss, or the data or settings are invalid for it.
    """
    formula = _FORMULAS.get(name)
    if formula is None:
        known = ", ".join(sorted(_FORMULAS))
        raise ValidationError(f"unknown loss {name!r}", remedy=f"expected {known} or custom")
    targets = read_targets(data, lengths)
    settings = {
        key: number_setting(config, key, default) for key, default in formula.settings.items()
    }
    _check_thresholds(settings)
    inputs = CellInputs(
        name,
        data,
        targets,
        required=formula.required,
        optional={key: settings.get(key, math.nan) for key in formula.optional},
    )
    kind = SequenceLoss if formula.is_of_sequences else TokenLoss
    return kind(formula, settings, inputs, targets)


def _check_thresholds(settings: Mapping[str, float]) -> None:
    low, high = (settings.get(key) for key in _CLIPS)
    if low is not None and high is not None and low > high:
        raise ValidationError(
            f"clip_low_threshold is {low:g}, which is above clip_high_threshold, {high:g}",
            remedy="the thresholds bound the ratio itself: use 0.8 and 1.2, not 0.2",
        )


# From cells to gradients


class Terms(NamedTuple):
    """Per-cell results, float64."""

    losses: Tensor
    gradients: Tensor
    ratios: Tensor | None = None
    """The importance ratios."""
    clipped: Tensor | None = None
    """Where clipping changed the loss; None if the loss does not clip."""


class Formula(NamedTuple):
    """The definition of a loss: how it is computed and which inputs it reads."""

    terms: Callable[[Tensor, Cells, Mapping[str, float]], Terms]
    required: tuple[str, ...]
    settings: Mapping[str, float] = {}
    optional: tuple[str, ...] = ()
    is_of_sequences: bool = False

    @property
    def weight(self) -> str:
        """The input that weights the cells."""
        return "weights" if "weights" in self.required else "advantages"


class _FormulaLoss(Loss):
    def __init__(
        self,
        formula: Formula,
        settings: Mapping[str, float],
        inputs: CellInputs,
        targets: Targets,
    ) -> None:
        self.targets = targets
        self._formula = formula
        self._settings = settings
        self._inputs = inputs

    def datum_gradients(self, index: int, lp: Tensor) -> Tensor:
        """dloss/dlp of one datum, in the shape of its log-probabilities."""
        return self._gradients(self.targets.spans[index], lp.reshape(-1)).reshape(lp.shape)

    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """The loss and the metrics, from the log-probabilities of all cells."""
        lp_C = lp_C.detach().reshape(-1).cpu()
        terms = self._all_terms(lp_C)
        loss = total(terms.losses)
        check_finite(loss, lp_C, terms.gradients)
        weights_C = self._inputs.whole(self._formula.weight)
        assert weights_C is not None
        old_C = self._inputs.whole("logprobs")
        return Evaluation(
            loss,
            {training_metrics.LOSS: loss, **_metrics(self.targets, weights_C, lp_C, old_C, terms)},
        )

    def _all_terms(self, lp_C: Tensor) -> Terms:
        return self._terms(slice(None), lp_C)

    def _terms(self, part: ExampleRows, lp_C: Tensor) -> Terms:
        # In float64: kernels may round the last bit differently at the end of a slice, which
        # vanishes in float32.
        cells = self._inputs.at(part, lp_C.device)
        return self._formula.terms(lp_C.detach().double(), cells, self._settings)

    def _gradients(self, part: ExampleRows, lp_C: Tensor) -> Tensor:
        dlp_C = self._terms(part, lp_C).gradients.to(torch.float32)
        return dlp_C.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class TokenLoss(_FormulaLoss):
    """A loss whose gradient at a cell depends on that cell alone."""

    def gradients(self, part: ExampleRows, lp_C: Tensor) -> Tensor:
        """dloss/dlp of some cells.

        Args:
            part: The cells: a slice of all, or their indices.
            lp_C: Their log-probabilities, in the same order.
        """
        return self._gradients(part, lp_C)


class SequenceLoss(_FormulaLoss):
    """A loss whose gradients depend on all cells of a datum."""

    def _all_terms(self, lp_C: Tensor) -> Terms:
        parts = [self._terms(span, lp_C[span]) for span in self.targets.spans]
        losses, gradients, ratios, clipped = zip(*parts, strict=True)
        return Terms(*(torch.cat(columns) for columns in (losses, gradients, ratios, clipped)))


def total(numbers_C: Tensor) -> float:
    """The float64 sum, in an order that does not depend on the number of threads."""
    return float(numbers_C.double().cpu().numpy().sum())


def check_finite(loss: float, lp_C: Tensor, dlp_C: Tensor) -> None:
    """Reject numbers that would corrupt the weights.

    Raises:
        ValidationError: A log-probability, the loss or a gradient is NaN, infinite, or too large
            for float32.
    """
    if not bool(torch.isfinite(lp_C).all()):
        raise ValidationError(
            "the model's log-probabilities are not finite; no gradients were accumulated",
            remedy="restart from a checkpoint with a lower learning rate",
        )
    if not math.isfinite(loss) or not bool(torch.isfinite(dlp_C.to(torch.float32)).all()):
        what = (
            f"the loss is {loss}"
            if not math.isfinite(loss)
            else "a gradient of the loss is not finite"
        )
        raise ValidationError(
            f"{what}; no gradients were accumulated",
            remedy="check loss_fn_inputs for NaN, infinities and huge values",
        )


# Metrics


def _metrics(
    targets: Targets, weights_C: Tensor, lp_C: Tensor, old_C: Tensor | None, terms: Terms
) -> dict[str, float]:
    """Sums, extremes, and means over data: what combines exactly over chunks.

    The mean of a datum is over its cells of nonzero weight. A datum without any counts as if it had
    been sampled from the current model.
    """
    counts_C = weights_C != 0
    metrics = {
        training_metrics.TOKENS: float(targets.cells),
        training_metrics.WEIGHTED_TOKENS: float(counts_C.sum()),
        training_metrics.NLL: -total(lp_C[counts_C]),
    }
    if terms.ratios is None:
        return metrics
    assert old_C is not None
    ratios = terms.ratios[counts_C]
    means = _DatumMeans(targets, counts_C)
    metrics[training_metrics.RATIO_MEAN] = means.of(terms.ratios, without=1.0)
    metrics[training_metrics.RATIO_MAX] = float(ratios.max()) if len(ratios) else 1.0
    metrics[training_metrics.RATIO_MIN] = float(ratios.min()) if len(ratios) else 1.0
    metrics[training_metrics.KL] = means.of(old_C.double() - lp_C.double(), without=0.0)
    if terms.clipped is not None:
        metrics[training_metrics.CLIP_FRACTION] = means.of(terms.clipped.double(), without=0.0)
    return metrics


class _DatumMeans:
    def __init__(self, targets: Targets, counts_C: Tensor) -> None:
        sizes_D = torch.tensor([span.stop - span.start for span in targets.spans])
        self._datum_C = torch.repeat_interleave(torch.arange(len(sizes_D)), sizes_D)[counts_C]
        self._counts_C = counts_C
        self._sizes_D = torch.bincount(self._datum_C, minlength=len(sizes_D))

    def of(self, numbers_C: Tensor, *, without: float) -> float:
        """The mean over data of each datum's mean; `without` stands for a datum without cells."""
        sums_D = torch.bincount(
            self._datum_C, weights=numbers_C[self._counts_C], minlength=len(self._sizes_D)
        )
        means_D = torch.where(self._sizes_D > 0, sums_D / self._sizes_D.clamp(min=1), without)
        return total(means_D) / max(len(means_D), 1)


# Formulas


def _cross_entropy(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    dlp_C = -cells["weights"]
    return Terms(dlp_C * lp_C, dlp_C)


def _importance_sampling(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C = _ratio(lp_C - cells["logprobs"])
    losses_C = -ratios_C * cells["advantages"]
    return Terms(losses_C, losses_C, ratios_C)


def _ppo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C, a_C = _ratio(lp_C - cells["logprobs"]), cells["advantages"]
    whole_C, cut_C = ratios_C * a_C, cells.within(ratios_C) * a_C
    clipped_C = cut_C < whole_C
    dlp_C = torch.where(clipped_C, 0.0, -whole_C)
    return Terms(-torch.minimum(whole_C, cut_C), dlp_C, ratios_C, clipped_C)


def _cispo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C = _ratio(lp_C - cells["logprobs"])
    cut_C = cells.within(ratios_C)
    dlp_C = -cut_C * cells["advantages"]
    return Terms(dlp_C * lp_C, dlp_C, ratios_C, cut_C != ratios_C)


def _dro(lp_C: Tensor, cells: Cells, settings: Mapping[str, float]) -> Terms:
    a_C, gap_C, beta = cells["advantages"], lp_C - cells["logprobs"], settings["beta"]
    losses_C = -(lp_C * a_C - 0.5 * beta * gap_C**2)
    return Terms(losses_C, beta * gap_C - a_C, _ratio(gap_C))


def _gspo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    """Of one datum. Every cell's loss depends on all log-probabilities of the sequence ratio.

    If all advantages are equal, the gradients equal those of GSPO-token: −s·A / count each, times
    count cells.
    """
    a_C, gap_C = cells["advantages"], lp_C - cells["logprobs"]
    mask_C = cells.optional("sequence_ratio_mask", lp_C)
    mask_C = torch.where(mask_C.isnan(), (a_C != 0).double(), mask_C)  # NaN: not given
    weight = mask_C.sum()
    shares_C = mask_C / torch.where(weight == 0, 1.0, weight)
    ratios_C = _ratio((shares_C * gap_C).sum()).expand_as(lp_C)
    whole_C, cut_C = ratios_C * a_C, cells.within(ratios_C) * a_C
    clipped_C = cut_C < whole_C
    dlp_C = torch.where(clipped_C, 0.0, -whole_C).sum() * shares_C
    return Terms(-torch.minimum(whole_C, cut_C), dlp_C, ratios_C, clipped_C)


def _stable_reinforce(lp_C: Tensor, cells: Cells, settings: Mapping[str, float]) -> Terms:
    gap_C, kl = lp_C - cells["logprobs"], settings["kl_coeff"]
    ratios_C = _ratio(gap_C)
    cut_C = cells.within(ratios_C)
    clipped_C = cut_C != ratios_C
    losses_C = -cut_C * cells["advantages"]
    dlp_C = torch.where(clipped_C, 0.0, losses_C) + kl * gap_C
    return Terms(losses_C + 0.5 * kl * gap_C**2, dlp_C, ratios_C, clipped_C)


def _ratio(log_ratio_C: Tensor) -> Tensor:
    return torch.exp(log_ratio_C.clamp(max=LARGEST_LOG_RATIO))


_NO_BOUND = 1e38
_SAMPLED = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")


def _clips(low: float, high: float) -> dict[str, float]:
    return dict(zip(_CLIPS, (low, high), strict=True))


_FORMULAS = {
    "cross_entropy": Formula(_cross_entropy, ("weights",)),
    "importance_sampling": Formula(_importance_sampling, _SAMPLED),
    "ppo": Formula(_ppo, _SAMPLED, _clips(0.8, 1.2), _CLIPS),
    "cispo": Formula(_cispo, _SAMPLED, _clips(0.0, 4.0), _CLIPS),
    "dro": Formula(_dro, _SAMPLED, {"beta": 0.05}),
    "gspo": Formula(
        _gspo,
        _SAMPLED,
        _clips(0.8, 1.2),
        (*_CLIPS, "sequence_ratio_mask"),
        is_of_sequences=True,
    ),
    "stable_reinforce": Formula(
        _stable_reinforce,
        _SAMPLED,
        {"kl_coeff": 0.0, **_clips(0.0, _NO_BOUND)},
        _CLIPS,
    ),
}
