"""Log-probabilities over a prompt: of its tokens, of top tokens, of given targets, of alternatives.

Row i of a prompt is the output for token i; it predicts position i + 1. Results are collected chunk
by chunk during prefill, from the logits of a few rows at a time, and only what was requested is
computed.
"""

# R row of a chunk, V vocabulary, D feature, K requested token

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model.head import Head
from tinsmith.engine.model.lora import FusedLora, LoraSpan
from tinsmith.engine.model.token_sampling import (
    draw_many,
    logsumexp,
    stream_key,
    top_logprobs,
    uniform_numbers,
)
from tinsmith.errors import ValidationError
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import PromptAltTokens
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

Array: TypeAlias = "np.ndarray[Any, Any]"

SLICE_BYTES = 16 << 20
"""Maximum size of the logits computed at a time."""
MOST_DRAWS = 1 << 20
"""Random numbers reserved per position for alternatives."""


class PromptLogprobs:
    """Collects the prompt log-probabilities that one request asks for.

    Memory is allocated with the first rows, as many samples with long prompts may be waiting.
    """

    def __init__(self, request: SampleRequest, tokens: Array, seed: str, vocabulary: int) -> None:
        self._request = request
        self._slice_rows = max(1, SLICE_BYTES // (4 * vocabulary))
        self._tokens = tokens
        self.first_row = self._first_row(len(tokens))
        """Rows before it need not be computed."""
        self._targets = _Targets(request.target_prompt_logprobs, len(tokens) - 1)
        self._key = stream_key(seed, "alternatives")

    @cached_property
    def _logprobs(self) -> Array | None:
        if not self._request.prompt_logprobs:
            return None
        return np.full(len(self._tokens), math.nan, np.float32)

    @cached_property
    def _topk(self) -> tuple[Array, Array] | None:
        return _empty_topk(len(self._tokens), self._request.topk_prompt_logprobs)

    @cached_property
    def _alternatives(self) -> tuple[Array, Array]:
        shape = (len(self._tokens) - 1, self._request.prompt_alt_tokens_k)
        return np.zeros(shape, np.int64), np.zeros(shape, np.float32)

    def _first_row(self, length: int) -> int:
        request = self._request
        if request.topk_prompt_logprobs or request.prompt_alt_tokens_k:
            return 0
        if request.target_prompt_logprobs is not None:
            return 0
        if not request.prompt_logprobs:
            return length
        last_n = request.prompt_logprobs_last_n
        return 0 if last_n is None else max(0, length - 1 - last_n)

    def add_rows(self, start: int, hidden_RD: Tensor, head: Head, lora: FusedLora | None) -> None:
        """Process the rows from `start` on.

        Raises:
            ValidationError: The model's logits are not finite.
        """
        end = min(start + len(hidden_RD), len(self._tokens) - 1)
        first = max(start, self.first_row)
        size = self._slice_rows
        for begin in range(first, end, size):
            rows_RD = hidden_RD[begin - start : min(begin + size, end) - start]
            spans = () if lora is None else (LoraSpan(0, len(rows_RD), lora),)
            self._take(begin, head.logits(rows_RD, spans))

    def mark_complete(self) -> None:
        """All rows are processed: if the prompt is prefilled again, nothing is computed."""
        self.first_row = len(self._tokens)

    def _take(self, start: int, logits_RV: Tensor) -> None:
        end = start + len(logits_RV)
        totals_R = logsumexp(logits_RV)
        if not bool(totals_R.isfinite().all()):
            raise non_finite_logits()
        if self._logprobs is not None:
            next_R1 = torch.from_numpy(self._tokens[start + 1 : end + 1]).long().unsqueeze(-1)
            next_R1 = next_R1.to(logits_RV.device)
            found_R = logits_RV.gather(-1, next_R1).squeeze(-1) - totals_R
            self._logprobs[start + 1 : end + 1] = found_R.float().cpu().numpy()
        if self._topk is not None:
            ids_RK, logprobs_RK = top_logprobs(logits_RV, totals_R, self._topk[0].shape[1])
            place = slice(start + 1, end + 1), slice(ids_RK.shape[1])
            self._topk[0][place] = ids_RK.cpu().numpy()
            self._topk[1][place] = logprobs_RK.cpu().numpy()
        self._targets.take(start, logits_RV, totals_R)
        if self._request.prompt_alt_tokens_k:
            self._draw(start, logits_RV)

    def _draw(self, start: int, logits_RV: Tensor) -> None:
        end, k = start + len(logits_RV), self._request.prompt_alt_tokens_k
        places_RK = np.arange(start, end)[:, None] * MOST_DRAWS + np.arange(k)
        keys = np.full(places_RK.size, self._key, np.uint64)
        uniforms_RK = uniform_numbers(keys, places_RK.ravel()).view(-1, k).to(logits_RV.device)
        temperature = self._request.sampling_params.temperature
        tokens_RK, logprobs_RK = draw_many(logits_RV, temperature, uniforms_RK)
        self._alternatives[0][start:end] = tokens_RK.cpu().numpy()
        self._alternatives[1][start:end] = logprobs_RK.cpu().numpy()

    def fields(self) -> dict[str, Any]:
        """The prompt fields of a `SampleResponse`."""
        if self._logprobs is not None and self._request.prompt_logprobs_last_n is not None:
            self._logprobs[: -self._request.prompt_logprobs_last_n] = math.nan
        return {
            "prompt_logprobs_np": self._logprobs,
            "topk_prompt_logprobs_np": None if self._topk is None else TopkLogprobs(*self._topk),
            "target_prompt_logprobs": self._targets.tensor(),
            "prompt_alt_tokens": self._alternative_tokens(),
        }

    def _alternative_tokens(self) -> PromptAltTokens | None:
        if not self._request.prompt_alt_tokens_k:
            return None
        tokens, logprobs = self._alternatives
        shape = list(tokens.shape)
        return PromptAltTokens(
            TensorData(tokens.ravel(), "int64", shape),
            TensorData(logprobs.ravel(), "float32", shape),
        )


class _Targets:
    """Requested targets of each row, as a dense or sparse matrix."""

    def __init__(self, asked: TensorData | None, rows: int) -> None:
        self._asked = asked
        if asked is None:
            return
        self._tokens: Array = asked.numbers.numpy().astype(np.int64)
        if asked.row_starts is not None:
            self._starts: Array = asked.row_starts.numpy().astype(np.int64)
        else:
            columns = len(self._tokens) // rows if rows else 0
            self._starts = np.arange(rows + 1) * columns
        self._found = np.zeros(len(self._tokens), np.float32)

    def take(self, start: int, logits_RV: Tensor, totals_R: Tensor) -> None:
        if self._asked is None:
            return
        starts = self._starts[start : start + len(logits_RV) + 1]
        tokens = self._tokens[starts[0] : starts[-1]]
        rows = torch.from_numpy(np.repeat(np.arange(len(logits_RV)), np.diff(starts)))
        rows = rows.to(logits_RV.device)
        ids = torch.from_numpy(np.maximum(tokens, 0)).to(logits_RV.device)
        found = (logits_RV[rows, ids] - totals_R[rows]).float().cpu().numpy()
        self._found[starts[0] : starts[-1]] = np.where(tokens < 0, np.float32(0), found)

    def tensor(self) -> TensorData | None:
        """The results, in the layout of the request."""
        asked = self._asked
        if asked is None:
            return None
        return TensorData(
            self._found,
            "float32",
            asked.shape,
            asked.sparse_crow_indices,
            asked.sparse_col_indices,
        )


def _empty_topk(length: int, k: int) -> tuple[Array, Array] | None:
    if not k:
        return None
    return np.zeros((length, k), np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32)


def non_finite_logits() -> ValidationError:
    """The error for logits that are NaN or infinite."""
    return ValidationError(
        "the model's logits are NaN or infinite with these weights",
        remedy="sample from weights saved before training diverged",
    )
