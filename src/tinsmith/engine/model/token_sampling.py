"""Sampling of tokens from logits: temperature, top-k, top-p and log-probabilities.

Log-probabilities are the model's own, the log softmax of the unmodified logits: temperature, top-k
and top-p change which token is sampled and not its reported log-probability. They equal those of a
forward pass over the same tokens, which importance ratios in training rely on.

Random numbers are counter-based: the number that decides a token is a function of its sequence's
key (`stream_key`) and its position, so a draw is independent of all others. A token is found by
inverse transform sampling, which needs one random number per token; Gumbel noise would need one for
every entry of the vocabulary. The search goes over sums of blocks first and then into one block, so
that most of the vocabulary is only summed.

Every row is bit-identical whatever rows are beside it.

Knows nothing of requests and sequences.
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

from tinsmith.engine.model.kernels.library import kernels_for

# R row, V vocabulary (W padded to whole blocks), B block, K draw or top token

BLOCK = 256
"""Tokens per block of sums."""
SLICE_NUMBERS = 1 << 21
"""Logits processed at a time, so that they fit in cache."""
NUCLEUS_GUESS = 512
"""Top-p sorts so many of the likeliest tokens, and more only where these do not reach p. Sorting
the whole vocabulary takes ten times as long."""
NUCLEUS_GROWTH = 8
COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures are clamped to this range, which float32 supports; 0 is greedy instead."""

_MIX_1, _MIX_2, _STEP = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
    np.uint64(0x9E3779B97F4A7C15),
)


Numbers = Sequence[int] | np.ndarray[Any, Any]


class DrawSettings(NamedTuple):
    """The sampling parameters of one sequence."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """Only the k likeliest tokens; below 1 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that reach this probability together, after temperature and
    top-k."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature <= 0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p excludes tokens."""
        return self.top_k > 0 or self.top_p < 1


class Drawn(NamedTuple):
    """One sampled token per row."""

    tokens: Tensor
    logprobs: Tensor
    """NaN where the row's logits contain NaN or nothing finite."""
    logsumexp: Tensor
    """Of the row's logits: logit - logsumexp is a log-probability; float64."""


# Random numbers


def stream_key(seed: str, stream: str) -> int:
    """The 64-bit key of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniform_numbers(keys: Numbers, counts: Numbers) -> Tensor:
    """The `counts[i]`-th random number of the stream `keys[i]`, for each i; float64 in [0, 1).

    Args:
        keys: From `stream_key`.
        counts: Positions in the streams.
    """
    places = np.array(counts, np.uint64)
    # SplitMix64's mixer over the position, then over key and position together. Mixing once would
    # make every stream a section of the same one, and long streams might overlap.
    mixed = _mix(np.array(keys, np.uint64) ^ _mix((places + np.uint64(1)) * _STEP))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))


# Drawing


def draw(logits_RV: Tensor, settings: Sequence[DrawSettings], uniforms_R: Tensor) -> Drawn:
    """Sample one token per row.

    Args:
        logits_RV: float32, or the narrower dtype that they were computed in.
        settings: One for each row.
        uniforms_R: From `uniform_numbers`; ignored for greedy rows.
    """
    slices = [
        _draw_slice(logits_RV[rows], settings[rows], uniforms_R[rows])
        for rows in _slices(*logits_RV.shape)
    ]
    return slices[0] if len(slices) == 1 else Drawn(*map(torch.cat, zip(*slices, strict=True)))


def _slices(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, SLICE_NUMBERS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _draw_slice(logits_RV: Tensor, settings: Sequence[DrawSettings], uniforms_R: Tensor) -> Drawn:
    exp_logits = _ExpLogits(logits_RV)
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for kind, rows in _by_kind(settings).items():
        is_all = len(rows) == len(settings)
        place = slice(None) if is_all else torch.tensor(rows, device=logits_RV.device)
        if kind is None:
            tokens_R[place] = logits_RV[place].argmax(dim=-1)
            continue
        drawn = exp_logits if is_all else exp_logits.rows(place)
        temperatures = [settings[row].temperature for row in rows]
        if any(temperature != 1 for temperature in temperatures):
            drawn = _ExpLogits(logits_RV[place], temperatures)
        if kind == _UNFILTERED:
            tokens_R[place] = drawn.find(uniforms_R[place].unsqueeze(-1)).squeeze(-1)
        else:
            tokens_R[place] = _sample_filtered(drawn, *kind, uniforms_R[place])
    logprobs_R = logits_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1) - exp_logits.logsumexp_R
    return Drawn(tokens_R, logprobs_R.float(), exp_logits.logsumexp_R)


_UNFILTERED = (-1, 1.0)


def _by_kind(settings: Sequence[DrawSettings]) -> dict[tuple[int, float] | None, list[int]]:
    """Rows grouped by top-k and top-p; None for greedy ones."""
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


class _ExpLogits:
    """exp((logit - max) / temperature) of each row, and its cumulative sums over blocks.

    Stored in a buffer of this thread that the next instance of the same kind reuses: fresh memory
    for a vocabulary costs more than the computation.
    """

    def __init__(self, logits_RV: Tensor, temperatures: Sequence[float] | None = None) -> None:
        rows, self.vocabulary = logits_RV.shape
        width = -(-self.vocabulary // BLOCK) * BLOCK
        # Rows start at block boundaries, so that vector instructions, and with them the rounding,
        # are the same for each row.
        self.exp_RW = _buffer(logits_RV.device, rows, width, is_tempered=temperatures is not None)
        bounded = [min(max(one, COLDEST), HOTTEST) for one in temperatures or [1.0] * rows]
        kernels = kernels_for(logits_RV[:, :0])
        if kernels is not None:
            inverse_temperatures_R = 1.0 / torch.tensor(bounded, dtype=torch.float32)
            self.sums_RB, max_R = kernels.exp_logits(
                logits_RV, inverse_temperatures_R, BLOCK, self.exp_RW
            )
        else:
            max_R = logits_RV.amax(dim=-1).float()
            self.sums_RB = self._compute(logits_RV, max_R, bounded)
        self.logsumexp_R = self.sums_RB[:, -1].log() + max_R

    def _compute(self, logits_RV: Tensor, max_R: Tensor, temperatures: list[float]) -> Tensor:
        exp_RW = self.exp_RW
        exp_RW[:, self.vocabulary :] = -math.inf
        torch.sub(logits_RV, max_R.unsqueeze(-1), out=exp_RW[:, : self.vocabulary])
        if any(one != 1.0 for one in temperatures):
            exp_RW /= exp_RW.new_tensor(temperatures).unsqueeze(-1)
        exp_RW.exp_()
        # Block sums in float32 are accurate to about 1e-7 of a block; they are added in float64.
        return exp_RW.view(len(exp_RW), -1, BLOCK).sum(dim=-1).double().cumsum(dim=-1)

    def rows(self, place: Tensor | slice) -> _ExpLogits:
        """A subset of the rows."""
        found = object.__new__(_ExpLogits)
        found.vocabulary = self.vocabulary
        found.exp_RW = self.exp_RW[place]
        found.sums_RB = self.sums_RB[place]
        found.logsumexp_R = self.logsumexp_R[place]
        return found

    def find(self, uniforms_RK: Tensor) -> Tensor:
        """The tokens at these quantiles of the cumulative distribution."""
        points_RK = _below(uniforms_RK * self.sums_RB[:, -1:], self.sums_RB[:, -1:])
        blocks_RK = torch.searchsorted(self.sums_RB, points_RK, right=True)
        blocks_RK.clamp_(max=self.sums_RB.shape[1] - 1)  # for rows with NaN
        before_RB = torch.nn.functional.pad(self.sums_RB[:, :-1], (1, 0))
        points_RK = points_RK - before_RB.gather(-1, blocks_RK)
        starts_RK1 = (blocks_RK * BLOCK).unsqueeze(-1)
        places_RKB = starts_RK1 + torch.arange(BLOCK, device=starts_RK1.device)
        exp_RKB = self.exp_RW.gather(-1, places_RKB.flatten(1)).view(places_RKB.shape)
        sums_RKB = exp_RKB.double().cumsum(dim=-1)
        # Summed in another order, the block may come to slightly less than before.
        points_RK = _below(points_RK, sums_RKB[..., -1])
        found_RK1 = torch.searchsorted(sums_RKB, points_RK.unsqueeze(-1), right=True)
        return (starts_RK1 + found_RK1).squeeze(-1).clamp_(max=self.vocabulary - 1)


class _ThreadBuffers(threading.local):
    plain: Tensor | None = None
    tempered: Tensor | None = None


_OF_THREAD = _ThreadBuffers()


def _buffer(device: torch.device, rows: int, width: int, *, is_tempered: bool) -> Tensor:
    kept = _OF_THREAD.tempered if is_tempered else _OF_THREAD.plain
    if kept is None or kept.device != device or len(kept) < rows * width:
        # A tensor made in inference mode could be written in inference mode only.
        with torch.inference_mode(mode=False):
            kept = torch.empty(rows * width, dtype=torch.float32, device=device)
        if is_tempered:
            _OF_THREAD.tempered = kept
        else:
            _OF_THREAD.plain = kept
    return kept[: rows * width].view(rows, width)


def _below(points: Tensor, limits: Tensor) -> Tensor:
    """Clamp points strictly below the limits, so that the search finds a possible token."""
    return torch.minimum(points, torch.nextafter(limits, torch.zeros_like(limits)))


def _sample_filtered(
    exp_logits: _ExpLogits, top_k: int, top_p: float, uniforms_R: Tensor
) -> Tensor:
    """Sample from each row with top-k or top-p."""
    if 0 < top_k < exp_logits.vocabulary:
        best = exp_logits.exp_RW.topk(top_k)
        return _sample_nucleus(best, best.values.double().sum(dim=-1), top_p, uniforms_R)
    totals_R, count = exp_logits.sums_RB[:, -1], NUCLEUS_GUESS
    found_R = torch.zeros(len(totals_R), dtype=torch.int64, device=totals_R.device)
    rows = torch.arange(len(totals_R), device=totals_R.device)
    while len(rows):
        best = exp_logits.exp_RW[rows].topk(min(count, exp_logits.vocabulary))
        found_R[rows] = _sample_nucleus(best, totals_R[rows], top_p, uniforms_R[rows])
        if count >= exp_logits.vocabulary:
            break
        # Rows whose nucleus is larger are searched again among more tokens.
        sums_R = best.values.double().cumsum(dim=-1)[:, -1]
        rows = rows[sums_R < top_p * totals_R[rows]]
        count *= NUCLEUS_GROWTH
    return found_R


def _sample_nucleus(
    best: torch.return_types.topk, totals_R: Tensor, top_p: float, uniforms_R: Tensor
) -> Tensor:
    """Sample from the first tokens that reach `top_p` of the total."""
    sums_RK = best.values.double().cumsum(dim=-1)
    before_RK = torch.nn.functional.pad(sums_RK[:, :-1], (1, 0))
    # The token that reaches the limit is included, so there is always one.
    kept_R1 = (before_RK < top_p * totals_R.unsqueeze(-1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    limits_R1 = sums_RK.gather(-1, kept_R1 - 1)
    points_R1 = _below(uniforms_R.unsqueeze(-1) * limits_R1, limits_R1)
    found_R1 = torch.searchsorted(sums_RK, points_R1, right=True)
    return best.indices.gather(-1, torch.minimum(found_R1, kept_R1 - 1)).squeeze(-1)


# Log-probabilities


def top_logprobs(logits_RV: Tensor, logsumexp_R: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row in descending order, and their log-probabilities."""
    best = logits_RV.topk(min(k, logits_RV.shape[-1]))
    return best.indices, (best.values - logsumexp_R.unsqueeze(-1)).float()


def draw_many(logits_RV: Tensor, temperature: float, uniforms_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens sampled from each row with replacement, and their log-probabilities."""
    tokens, logprobs = [], []
    for rows in _slices(*logits_RV.shape):
        some_RV, some_RK = logits_RV[rows], uniforms_RK[rows]
        exp_logits = _ExpLogits(some_RV)
        if temperature <= 0:
            drawn_RK = some_RV.argmax(dim=-1, keepdim=True).expand(some_RK.shape)
        elif temperature == 1:
            drawn_RK = exp_logits.find(some_RK)
        else:
            drawn_RK = _ExpLogits(some_RV, [temperature] * len(some_RV)).find(some_RK)
        tokens.append(drawn_RK)
        found_RK = some_RV.gather(-1, drawn_RK) - exp_logits.logsumexp_R.unsqueeze(-1)
        logprobs.append(found_RK.float())
    return torch.cat(tokens), torch.cat(logprobs)


def logsumexp(logits_RV: Tensor) -> Tensor:
    """The log-sum-exp of each row, float64, bit-identical to that of `Drawn`."""
    return torch.cat(
        [_ExpLogits(logits_RV[rows]).logsumexp_R for rows in _slices(*logits_RV.shape)]
    )
