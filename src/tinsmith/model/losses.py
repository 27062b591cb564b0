"""The losses, from log-probabilities to a sum, its slopes and its metrics.

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

The numbers on the right hold unless the configuration, or for thresholds an input of that name,
gives others. In gspo s = exp(mean(lp − q)) is the ratio of the whole datum, over the cells that
`sequence_ratio_mask` has, or over those with an advantage. docs/losses.md says what of this is
published and what is our choice.

Use, for one pass over the data of one work:

    loss = make_loss(name, config, [datum.loss_fn_inputs for datum in data])
    loss.targets.tokens[i]            # what to find the log-probabilities of
    loss.targets.spans[i]             # which cells are those of datum i
    if isinstance(loss, TokenLoss):   # any cells, as soon as their log-probabilities are known
        slopes = loss.slopes(slice(start, end), lp[start:end])
    else:                             # gspo, custom: a whole datum at a time
        slopes = loss.datum_slopes(i, lp[loss.targets.spans[i]])
    total, metrics = loss.evaluate(lp)   # when all are known; raises if a number is not finite

Slopes are dloss/dlp, float32, without autograd. They do not depend on how the cells are sliced. One
that is not finite is given as 0: `evaluate` will fail the work, and works that share its pack must
not see it. `metrics` are named `name:reduction` and have `loss:sum`; each joins over chunks of a
batch to what the whole batch would have had.
"""

# C cell, D datum

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.errors import ValidationError
from tinsmith.model.loss_inputs import (
    CellInputs,
    Cells,
    Config,
    Inputs,
    Part,
    Targets,
    number_setting,
    read_targets,
)
from tinsmith.observe import training_metrics

LARGEST_LOG_RATIO = 80.0
"""Far beyond any honest ratio, and its exponential still a float32: 0 · r stays 0."""


class Evaluation(NamedTuple):
    """What a pass came to."""

    loss: float
    metrics: dict[str, float]


class Loss(abc.ABC):
    """A loss over the data of one pass. It serves that pass alone."""

    targets: Targets

    @abc.abstractmethod
    def datum_slopes(self, index: int, lp: Tensor) -> Tensor:
        """The slopes of one datum, in the shape of its log-probabilities."""

    @abc.abstractmethod
    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """The loss and the metrics, from the log-probabilities of all cells.

        Raises:
            ValidationError: A log-probability, the loss or a slope is not finite.
        """


def make_loss(
    name: str, config: Config, data: Sequence[Inputs], lengths: Sequence[int] | None = None
) -> Loss:
    """One of the losses above; `custom_loss.py` has those that were uploaded.

    Args:
        name: What the API calls it.
        config: Its settings.
        data: The `loss_fn_inputs` of each datum.
        lengths: How many positions each datum has, if targets are to be checked against that.

    Raises:
        ValidationError: There is no such loss, or the data or the settings do not fit it.
    """
    formula = _FORMULAS.get(name)
    if formula is None:
        known = ", ".join(sorted(_FORMULAS))
        raise ValidationError(f"there is no loss {name!r}", remedy=f"known are {known}, custom")
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
            remedy="they bound the ratio itself: 0.8 and 1.2, where others say 0.2",
        )


# From cells to slopes


class Terms(NamedTuple):
    """Of some cells, as float64."""

    losses: Tensor
    slopes: Tensor
    ratios: Tensor | None = None
    """How much likelier a target is than it was when it was sampled."""
    clipped: Tensor | None = None
    """Where a threshold changed the loss; None if there are no thresholds."""


class Formula(NamedTuple):
    """A loss: how it is computed and what it reads."""

    terms: Callable[[Tensor, Cells, Mapping[str, float]], Terms]
    required: tuple[str, ...]
    settings: Mapping[str, float] = {}
    optional: tuple[str, ...] = ()
    is_of_sequences: bool = False

    @property
    def weight(self) -> str:
        """The input that says how much a cell counts."""
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

    def datum_slopes(self, index: int, lp: Tensor) -> Tensor:
        """See the base class."""
        return self._slopes(self.targets.spans[index], lp.reshape(-1)).reshape(lp.shape)

    def evaluate(self, lp_C: Tensor) -> Evaluation:
        """See the base class."""
        lp_C = lp_C.detach().reshape(-1).cpu()
        terms = self._all_terms(lp_C)
        loss = total(terms.losses)
        check_finite(loss, lp_C, terms.slopes)
        weights_C = self._inputs.whole(self._formula.weight)
        assert weights_C is not None
        old_C = self._inputs.whole("logprobs")
        return Evaluation(
            loss,
            {training_metrics.LOSS: loss, **_metrics(self.targets, weights_C, lp_C, old_C, terms)},
        )

    def _all_terms(self, lp_C: Tensor) -> Terms:
        return self._terms(slice(None), lp_C)

    def _terms(self, part: Part, lp_C: Tensor) -> Terms:
        # In float64: kernels may round the last bit differently at the end of a slice, and what
        # is left of that in float32 is nothing.
        cells = self._inputs.at(part, lp_C.device)
        return self._formula.terms(lp_C.detach().double(), cells, self._settings)

    def _slopes(self, part: Part, lp_C: Tensor) -> Tensor:
        slopes_C = self._terms(part, lp_C).slopes.to(torch.float32)
        return slopes_C.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class TokenLoss(_FormulaLoss):
    """A loss in which each cell counts by itself."""

    def slopes(self, part: Part, lp_C: Tensor) -> Tensor:
        """The slopes of some cells.

        Args:
            part: Which cells: a slice of all, or their numbers.
            lp_C: Their log-probabilities, in the same order.
        """
        return self._slopes(part, lp_C)


class SequenceLoss(_FormulaLoss):
    """A loss in which the cells of a datum count together."""

    def _all_terms(self, lp_C: Tensor) -> Terms:
        parts = [self._terms(span, lp_C[span]) for span in self.targets.spans]
        losses, slopes, ratios, clipped = zip(*parts, strict=True)
        return Terms(*(torch.cat(columns) for columns in (losses, slopes, ratios, clipped)))


def total(numbers_C: Tensor) -> float:
    """The sum as float64, in an order that does not depend on the number of threads."""
    return float(numbers_C.double().cpu().numpy().sum())


def check_finite(loss: float, lp_C: Tensor, slopes_C: Tensor) -> None:
    """Refuse numbers that would spoil the weights.

    Raises:
        ValidationError: A log-probability, the loss or a slope is NaN, infinite, or too large for
            float32.
    """
    if not bool(torch.isfinite(lp_C).all()):
        raise ValidationError(
            "the model gives log-probabilities that are not finite; nothing was added to the "
            "gradients",
            remedy="go back to a checkpoint and take a lower learning rate",
        )
    if not math.isfinite(loss) or not bool(torch.isfinite(slopes_C.to(torch.float32)).all()):
        what = f"the loss is {loss}" if not math.isfinite(loss) else "a slope is not finite"
        raise ValidationError(
            f"{what}; nothing was added to the gradients",
            remedy="look for NaN, infinities and huge values in loss_fn_inputs",
        )


# Metrics


def _metrics(
    targets: Targets, weights_C: Tensor, lp_C: Tensor, old_C: Tensor | None, terms: Terms
) -> dict[str, float]:
    """Sums, extremes, and means over data, which are all that joins exactly over chunks.

    The mean of a datum is over its cells whose weight is not 0. A datum that has none counts as one
    whose model is the one that it was sampled from.
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
        """The mean over data of each one's mean; `without` is that of a datum with no such cell."""
        sums_D = torch.bincount(
            self._datum_C, weights=numbers_C[self._counts_C], minlength=len(self._sizes_D)
        )
        means_D = torch.where(self._sizes_D > 0, sums_D / self._sizes_D.clamp(min=1), without)
        return total(means_D) / max(len(means_D), 1)


# Formulas


def _cross_entropy(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    slopes_C = -cells["weights"]
    return Terms(slopes_C * lp_C, slopes_C)


def _importance_sampling(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C = _ratio(lp_C - cells["logprobs"])
    losses_C = -ratios_C * cells["advantages"]
    return Terms(losses_C, losses_C, ratios_C)


def _ppo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C, a_C = _ratio(lp_C - cells["logprobs"]), cells["advantages"]
    whole_C, cut_C = ratios_C * a_C, cells.within(ratios_C) * a_C
    clipped_C = cut_C < whole_C
    slopes_C = torch.where(clipped_C, 0.0, -whole_C)
    return Terms(-torch.minimum(whole_C, cut_C), slopes_C, ratios_C, clipped_C)


def _cispo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    ratios_C = _ratio(lp_C - cells["logprobs"])
    cut_C = cells.within(ratios_C)
    slopes_C = -cut_C * cells["advantages"]
    return Terms(slopes_C * lp_C, slopes_C, ratios_C, cut_C != ratios_C)


def _dro(lp_C: Tensor, cells: Cells, settings: Mapping[str, float]) -> Terms:
    a_C, gap_C, beta = cells["advantages"], lp_C - cells["logprobs"], settings["beta"]
    losses_C = -(lp_C * a_C - 0.5 * beta * gap_C**2)
    return Terms(losses_C, beta * gap_C - a_C, _ratio(gap_C))


def _gspo(lp_C: Tensor, cells: Cells, _: Mapping[str, float]) -> Terms:
    """Of one datum. Every cell's loss moves with every log-probability that the ratio is made of.

    Where all advantages are the same, the slopes are those of GSPO-token too: −s·A / count each,
    times count cells.
    """
    a_C, gap_C = cells["advantages"], lp_C - cells["logprobs"]
    mask_C = cells.optional("sequence_ratio_mask", lp_C)
    mask_C = torch.where(mask_C.isnan(), (a_C != 0).double(), mask_C)  # NaN: not given
    weight = mask_C.sum()
    shares_C = mask_C / torch.where(weight == 0, 1.0, weight)
    ratios_C = _ratio((shares_C * gap_C).sum()).expand_as(lp_C)
    whole_C, cut_C = ratios_C * a_C, cells.within(ratios_C) * a_C
    clipped_C = cut_C < whole_C
    slopes_C = torch.where(clipped_C, 0.0, -whole_C).sum() * shares_C
    return Terms(-torch.minimum(whole_C, cut_C), slopes_C, ratios_C, clipped_C)


def _stable_reinforce(lp_C: Tensor, cells: Cells, settings: Mapping[str, float]) -> Terms:
    gap_C, kl = lp_C - cells["logprobs"], settings["kl_coeff"]
    ratios_C = _ratio(gap_C)
    cut_C = cells.within(ratios_C)
    clipped_C = cut_C != ratios_C
    losses_C = -cut_C * cells["advantages"]
    slopes_C = torch.where(clipped_C, 0.0, losses_C) + kl * gap_C
    return Terms(losses_C + 0.5 * kl * gap_C**2, slopes_C, ratios_C, clipped_C)


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
