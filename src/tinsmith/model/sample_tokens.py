"""From rows of logits to tokens: temperature, top-k, top-p, chance and log-probabilities.

Log-probabilities are the model's own, log softmax of the logits as they are: temperature, top-k and
top-p change which token is drawn and not what is said about it. They equal what a forward pass over
the same tokens gives, which is what importance ratios in training rest on.

Chance is counted, not carried along: the number that decides a token follows from the key of its
sequence (`stream_key`) and its place in it. So a draw depends on nothing that was drawn before or
beside it. A token is found by walking up the sum of all tokens' shares until the number is reached;
the way of adding random noise to each logit would need a random number for each token of the
vocabulary. The sum goes over blocks first and into one block then, so that most of the vocabulary
is only added up.

Every row is computed alike, whatever rows stand beside it, bit for bit.

Knows no requests and no sequences.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.model.kernels.library import kernels_for

# R row, V vocabulary (W with the padding of the last block), B block, K draw or best token

BLOCK = 256
"""How many tokens' shares are added up before the search for a draw goes into single ones."""
SLICE_NUMBERS = 1 << 21
"""How many numbers of the vocabulary are worked on at a time: what caches hold."""
NUCLEUS_GUESS = 512
"""Top-p sorts so many of the likeliest tokens, and more only where these fall short of the share.
Sorting all takes ten times as long."""
NUCLEUS_GROWTH = 8
COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures outside are taken as these; float32 has no room beyond. 0 is not among them: it
takes the likeliest token."""

_MIX_1, _MIX_2, _STEP = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
    np.uint64(0x9E3779B97F4A7C15),
)


Numbers = Sequence[int] | np.ndarray[Any, Any]


class DrawSettings(NamedTuple):
    """How tokens of one sequence are drawn."""

    temperature: float = 1.0
    """0 takes the likeliest."""
    top_k: int = -1
    """Of the likeliest so many only; below 1 of all."""
    top_p: float = 1.0
    """Of the likeliest only that reach this share together, after temperature and top-k."""

    @property
    def is_greedy(self) -> bool:
        """Whether chance plays no part."""
        return self.temperature <= 0

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1


class Drawn(NamedTuple):
    """One token for each row, and what the model says about it."""

    tokens: Tensor
    logprobs: Tensor
    """Of the model. NaN where the row's logits hold a NaN, or nothing finite."""
    log_totals: Tensor
    """What to subtract from a logit of the row to get its log-probability; float64."""


# Chance


def stream_key(seed: str, stream: str) -> int:
    """The 64-bit key of a sequence of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def chances(keys: Numbers, counts: Numbers) -> Tensor:
    """The `counts[i]`-th random number of the stream `keys[i]`, for each i; float64 in [0, 1).

    Args:
        keys: From `stream_key`.
        counts: Places in the streams.
    """
    places = np.array(counts, np.uint64)
    # SplitMix64's mixer, over the place and then over the key with it. One mixing alone would make
    # every stream a stretch of one and the same, and long streams might overlap.
    mixed = _mix(np.array(keys, np.uint64) ^ _mix((places + np.uint64(1)) * _STEP))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))


# Drawing


def draw(logits_RV: Tensor, settings: Sequence[DrawSettings], chances_R: Tensor) -> Drawn:
    """One token for each row, by the row's settings and its chance.

    Args:
        logits_RV: float32, or the narrower type that they were computed in.
        settings: One for each row.
        chances_R: From `chances`; a greedy row's is not looked at.
    """
    slices = [
        _draw_slice(logits_RV[rows], settings[rows], chances_R[rows])
        for rows in _slices(*logits_RV.shape)
    ]
    return slices[0] if len(slices) == 1 else Drawn(*map(torch.cat, zip(*slices, strict=True)))


def _slices(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, SLICE_NUMBERS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _draw_slice(logits_RV: Tensor, settings: Sequence[DrawSettings], chances_R: Tensor) -> Drawn:
    shares = _Shares(logits_RV)
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for kind, rows in _by_kind(settings).items():
        is_all = len(rows) == len(settings)
        place = slice(None) if is_all else torch.tensor(rows, device=logits_RV.device)
        if kind is None:
            tokens_R[place] = logits_RV[place].argmax(dim=-1)
            continue
        drawn = shares if is_all else shares.rows(place)
        temperatures = [settings[row].temperature for row in rows]
        if any(temperature != 1 for temperature in temperatures):
            drawn = _Shares(logits_RV[place], temperatures)
        if kind == _UNFILTERED:
            tokens_R[place] = drawn.find(chances_R[place].unsqueeze(-1)).squeeze(-1)
        else:
            tokens_R[place] = _find_filtered(drawn, *kind, chances_R[place])
    logprobs_R = logits_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1) - shares.log_totals_R
    return Drawn(tokens_R, logprobs_R.float(), shares.log_totals_R)


_UNFILTERED = (-1, 1.0)


def _by_kind(settings: Sequence[DrawSettings]) -> dict[tuple[int, float] | None, list[int]]:
    """Rows that are drawn alike: None for greedy ones, else top-k and top-p."""
    found: dict[tuple[int, float] | None, list[int]] = {}
    for row, one in enumerate(settings):
        if one.is_greedy:
            kind = None
        elif one.is_filtered:
            kind = (max(one.top_k, 0), one.top_p)
        else:
            kind = _UNFILTERED
        found.setdefault(kind, []).append(row)
    return found


class _Shares:
    """What share each token has, before division by the row's total, and the sums over blocks.

    They are in memory of this thread, which its next shares of the same kind take: fresh memory for
    a vocabulary costs more than to compute what is in it.
    """

    def __init__(self, logits_RV: Tensor, temperatures: Sequence[float] | None = None) -> None:
        rows, self.vocabulary = logits_RV.shape
        width = -(-self.vocabulary // BLOCK) * BLOCK
        # Rows begin at whole blocks in memory: what a vector instruction takes together, and so how
        # a number is rounded, is then the same in each row.
        self.shares_RW = _room(logits_RV.device, rows, width, is_tempered=temperatures is not None)
        bounded = [min(max(one, COLDEST), HOTTEST) for one in temperatures or [1.0] * rows]
        kernels = kernels_for(logits_RV[:, :0])
        if kernels is not None:
            colder_R = 1.0 / torch.tensor(bounded, dtype=torch.float32)
            self.sums_RB, most_R = kernels.shares(logits_RV, colder_R, BLOCK, self.shares_RW)
        else:
            most_R = logits_RV.amax(dim=-1).float()
            self.sums_RB = self._compute(logits_RV, most_R, bounded)
        self.log_totals_R = self.sums_RB[:, -1].log() + most_R

    def _compute(self, logits_RV: Tensor, most_R: Tensor, temperatures: list[float]) -> Tensor:
        shares_RW = self.shares_RW
        shares_RW[:, self.vocabulary :] = -math.inf
        torch.sub(logits_RV, most_R.unsqueeze(-1), out=shares_RW[:, : self.vocabulary])
        if any(one != 1.0 for one in temperatures):
            shares_RW /= shares_RW.new_tensor(temperatures).unsqueeze(-1)
        shares_RW.exp_()
        # Sums of blocks in float32 err by some 1e-7 of a block, and these add up in float64.
        return shares_RW.view(len(shares_RW), -1, BLOCK).sum(dim=-1).double().cumsum(dim=-1)

    def rows(self, place: Tensor | slice) -> _Shares:
        """Some of the rows."""
        found = object.__new__(_Shares)
        found.vocabulary = self.vocabulary
        found.shares_RW = self.shares_RW[place]
        found.sums_RB = self.sums_RB[place]
        found.log_totals_R = self.log_totals_R[place]
        return found

    def find(self, chances_RK: Tensor) -> Tensor:
        """The tokens at which the running sum of shares passes these parts of the total."""
        points_RK = _below(chances_RK * self.sums_RB[:, -1:], self.sums_RB[:, -1:])
        blocks_RK = torch.searchsorted(self.sums_RB, points_RK, right=True)
        blocks_RK.clamp_(max=self.sums_RB.shape[1] - 1)  # of a row with NaN
        before_RB = torch.nn.functional.pad(self.sums_RB[:, :-1], (1, 0))
        points_RK = points_RK - before_RB.gather(-1, blocks_RK)
        starts_RK1 = (blocks_RK * BLOCK).unsqueeze(-1)
        places_RKB = starts_RK1 + torch.arange(BLOCK, device=starts_RK1.device)
        shares_RKB = self.shares_RW.gather(-1, places_RKB.flatten(1)).view(places_RKB.shape)
        sums_RKB = shares_RKB.double().cumsum(dim=-1)
        # Added up in another order the block may come to a little less than its sum was.
        points_RK = _below(points_RK, sums_RKB[..., -1])
        found_RK1 = torch.searchsorted(sums_RKB, points_RK.unsqueeze(-1), right=True)
        return (starts_RK1 + found_RK1).squeeze(-1).clamp_(max=self.vocabulary - 1)


class _RoomOfThread(threading.local):
    plain: Tensor | None = None
    tempered: Tensor | None = None


_OF_THREAD = _RoomOfThread()


def _room(device: torch.device, rows: int, width: int, *, is_tempered: bool) -> Tensor:
    kept = _OF_THREAD.tempered if is_tempered else _OF_THREAD.plain
    if kept is None or kept.device != device or len(kept) < rows * width:
        # What is made in a sampler's step could else be written in such steps alone.
        with torch.inference_mode(mode=False):
            kept = torch.empty(rows * width, dtype=torch.float32, device=device)
        if is_tempered:
            _OF_THREAD.tempered = kept
        else:
            _OF_THREAD.plain = kept
    return kept[: rows * width].view(rows, width)


def _below(points: Tensor, limits: Tensor) -> Tensor:
    """Points strictly below the limits, so that the search ends at a token that has a share."""
    return torch.minimum(points, torch.nextafter(limits, torch.zeros_like(limits)))


def _find_filtered(shares: _Shares, top_k: int, top_p: float, chances_R: Tensor) -> Tensor:
    """A token of each row among the likeliest ones."""
    if 0 < top_k < shares.vocabulary:
        best = shares.shares_RW.topk(top_k)
        return _find_in_nucleus(best, best.values.double().sum(dim=-1), top_p, chances_R)
    totals_R, count = shares.sums_RB[:, -1], NUCLEUS_GUESS
    found_R = torch.zeros(len(totals_R), dtype=torch.int64, device=totals_R.device)
    rows = torch.arange(len(totals_R), device=totals_R.device)
    while len(rows):
        best = shares.shares_RW[rows].topk(min(count, shares.vocabulary))
        found_R[rows] = _find_in_nucleus(best, totals_R[rows], top_p, chances_R[rows])
        if count >= shares.vocabulary:
            break
        # Where these are not enough, what was found is found again among more.
        sums_R = best.values.double().cumsum(dim=-1)[:, -1]
        rows = rows[sums_R < top_p * totals_R[rows]]
        count *= NUCLEUS_GROWTH
    return found_R


def _find_in_nucleus(
    best: torch.return_types.topk, totals_R: Tensor, top_p: float, chances_R: Tensor
) -> Tensor:
    """A token among the first that have `top_p` of the total together."""
    sums_RK = best.values.double().cumsum(dim=-1)
    before_RK = torch.nn.functional.pad(sums_RK[:, :-1], (1, 0))
    # The token that reaches the limit is kept, so that there is always one.
    kept_R1 = (before_RK < top_p * totals_R.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    limits_R1 = sums_RK.gather(-1, kept_R1 - 1)
    points_R1 = _below(chances_R.unsqueeze(-1) * limits_R1, limits_R1)
    found_R1 = torch.searchsorted(sums_RK, points_R1, right=True)
    return best.indices.gather(-1, torch.minimum(found_R1, kept_R1 - 1)).squeeze(-1)


# What else is said about a row


def top_logprobs(logits_RV: Tensor, log_totals_R: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row, best first, and their log-probabilities."""
    best = logits_RV.topk(min(k, logits_RV.shape[-1]))
    return best.indices, (best.values - log_totals_R.unsqueeze(-1)).float()


def draw_many(logits_RV: Tensor, temperature: float, chances_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens drawn from each row with replacement, and their log-probabilities of the model."""
    tokens, logprobs = [], []
    for rows in _slices(*logits_RV.shape):
        some_RV, some_RK = logits_RV[rows], chances_RK[rows]
        shares = _Shares(some_RV)
        if temperature <= 0:
            drawn_RK = some_RV.argmax(dim=-1, keepdim=True).expand(some_RK.shape)
        elif temperature == 1:
            drawn_RK = shares.find(some_RK)
        else:
            drawn_RK = _Shares(some_RV, [temperature] * len(some_RV)).find(some_RK)
        tokens.append(drawn_RK)
        found_RK = some_RV.gather(-1, drawn_RK) - shares.log_totals_R.unsqueeze(-1)
        logprobs.append(found_RK.float())
    return torch.cat(tokens), torch.cat(logprobs)


def log_totals(logits_RV: Tensor) -> Tensor:
    """What to subtract from a row's logits to get log-probabilities; float64, as in `Drawn`."""
    return torch.cat([_Shares(logits_RV[rows]).log_totals_R for rows in _slices(*logits_RV.shape)])
