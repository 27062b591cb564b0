"""The losses, as sums over positions, and their gradients with respect to the log-probabilities.

With lp the log-probability of a target, w, A and q the datum's `weights`, `advantages` and
`logprobs`, and r = exp(lp − q):

    cross_entropy         −w·lp
    importance_sampling   −r·A
    ppo                   −min(r·A, clip(r)·A)           clip to 0.8 … 1.2 unless configured
    cispo                 −clip(r)·lp·A                  clip to 0 … 4, not differentiated
    dro                   −(lp·A − ½·beta·(lp − q)²)     beta 0.05 unless configured
    gspo                  as ppo, with the sequence's ratio, exp(mean(lp − q)): the mean over the
                          positions in `sequence_ratio_mask`, else those with an advantage
    stable_reinforce      −clip(r)·A + ½·kl_coeff·(lp − q)²    no clip, kl_coeff 0 unless configured

What the hosted service computes for the last two is not known; docs/losses.md defines our version.
Thresholds may also be given per position, as inputs of the same names. A datum's terms are summed
in float64. `engine/model/losses.py` implements the same losses in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tinsmith.engine.fake.arithmetic import Array
from tinsmith.errors import ValidationError
from tinsmith.types.inputs import Datum

Config = Mapping[str, float | str]
Loss = tuple[float, Array]
"""The loss of one datum, and its gradient with respect to each log-probability."""

LARGEST_LOG_RATIO = 80.0
"""Far beyond any realistic ratio, and its exponential is still finite."""


def datum_loss(name: str, lp: Array, datum: Datum, config: Config) -> Loss:
    """The loss of one datum.

    Raises:
        ValidationError: The loss is unknown, or the datum lacks one of its inputs.
    """
    if name not in _LOSSES:
        raise ValidationError(
            f"unknown loss {name!r}", remedy=f"expected {', '.join(sorted(_LOSSES))} or custom"
        )
    return _LOSSES[name](lp, _Given(name, datum, config, lp.shape))


class _Given:
    """The inputs of a loss: a datum and the configuration."""

    def __init__(self, loss: str, datum: Datum, config: Config, shape: tuple[int, ...]) -> None:
        self._loss = loss
        self._datum = datum
        self._config = config
        self._shape = shape

    def input(self, name: str) -> Array:
        """A required input: one number per target."""
        found = self.optional(name)
        if found is None:
            raise ValidationError(f"a datum has no {name!r}, which {self._loss} needs")
        return found

    def optional(self, name: str) -> Array | None:
        tensor = self._datum.loss_fn_inputs.get(name)
        if tensor is None:
            return None
        array = tensor.to_numpy().astype(np.float64)
        if array.size != np.prod(self._shape, dtype=int):
            raise ValidationError(
                f"a datum has {array.size} {name} for targets of shape {list(self._shape)}"
            )
        return array.reshape(self._shape)

    def setting(self, name: str, default: float) -> float:
        """A number from the configuration, else the default."""
        return float(self._config.get(name, default))

    def clipped(self, ratio: Array, low: float, high: float) -> Array:
        """The ratio, clipped to its thresholds."""
        low = self.setting("clip_low_threshold", low)
        high = self.setting("clip_high_threshold", high)
        if low > high:
            raise ValidationError(
                f"clip_low_threshold is {low:g}, which is above clip_high_threshold, {high:g}"
            )
        lows, highs = self.optional("clip_low_threshold"), self.optional("clip_high_threshold")
        lowest: Any = low if lows is None else lows
        highest: Any = high if highs is None else highs
        found: Array = np.minimum(np.maximum(ratio, lowest), highest)
        return found


def _ratio(lp: Array, q: Array) -> Array:
    ratio: Array = np.exp(np.minimum(lp - q, LARGEST_LOG_RATIO))
    return ratio


def _cross_entropy(lp: Array, given: _Given) -> Loss:
    w = given.input("weights")
    return float((-w * lp).sum()), -w


def _importance_sampling(lp: Array, given: _Given) -> Loss:
    terms = _ratio(lp, given.input("logprobs")) * given.input("advantages")
    return float(-terms.sum()), -terms


def _ppo(lp: Array, given: _Given) -> Loss:
    ratio, a = _ratio(lp, given.input("logprobs")), given.input("advantages")
    whole, cut = ratio * a, given.clipped(ratio, 0.8, 1.2) * a
    return float(-np.minimum(whole, cut).sum()), np.where(cut < whole, 0.0, -whole)


def _cispo(lp: Array, given: _Given) -> Loss:
    ratio = _ratio(lp, given.input("logprobs"))
    slopes = -given.clipped(ratio, 0.0, 4.0) * given.input("advantages")
    return float((slopes * lp).sum()), slopes


def _dro(lp: Array, given: _Given) -> Loss:
    a, gap, beta = (
        given.input("advantages"),
        lp - given.input("logprobs"),
        given.setting("beta", 0.05),
    )
    return float(-(lp * a - 0.5 * beta * gap**2).sum()), -(a - beta * gap)


def _gspo(lp: Array, given: _Given) -> Loss:
    q, a, mask = (
        given.input("logprobs"),
        given.input("advantages"),
        given.optional("sequence_ratio_mask"),
    )
    mask = (a != 0).astype(np.float64) if mask is None else mask
    count = float(mask.sum()) or 1.0
    mean = float((mask * (lp - q)).sum()) / count
    ratio = np.full_like(lp, np.exp(min(mean, LARGEST_LOG_RATIO)))
    whole, cut = ratio * a, given.clipped(ratio, 0.8, 1.2) * a
    pull = -np.where(cut < whole, 0.0, whole)
    return float(-np.minimum(whole, cut).sum()), pull.sum() * mask / count


def _stable_reinforce(lp: Array, given: _Given) -> Loss:
    q, kl = given.input("logprobs"), given.setting("kl_coeff", 0.0)
    ratio, gap = _ratio(lp, q), lp - q
    cut = given.clipped(ratio, 0.0, np.inf)
    losses = -cut * given.input("advantages")
    slopes = np.where(cut == ratio, losses, 0.0) + kl * gap
    return float((losses + 0.5 * kl * gap**2).sum()), slopes


_LOSSES: dict[str, Callable[[Array, _Given], Loss]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "stable_reinforce": _stable_reinforce,
}
