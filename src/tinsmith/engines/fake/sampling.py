"""One sample of the fake engine: drawn a few tokens at a time, each from numbers of its own.

Everything follows from the weights, the request and its seed. Sequence i is drawn with `seed:i`;
without a seed in the request, the work's id takes its place, so that a sample that is run again
after a crash gives the same tokens. Log-probabilities are those of the model, whatever the
temperature.

A stop that is a token id ends the sequence, and is its last token. There is no tokenizer here: a
token reads as the character with its number, which is how stop texts are found. A sequence also
ends at the end-of-sequence token; with `stop` `[]` it ends at nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from tinsmith.engines.base import SampleTokens, SampleWork
from tinsmith.engines.fake import arithmetic
from tinsmith.engines.fake.arithmetic import CLASSES, EOS, Array, Vocabulary
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

_LAST_CHARACTER = 0x10FFFF


class Draws:
    """Draws tokens from one table, under the settings of one request."""

    def __init__(self, table_CK: Array, vocabulary: Vocabulary, params: SamplingParams) -> None:
        self.table_CK = table_CK
        self.vocabulary = vocabulary
        self._params = params
        self._rows: dict[int, tuple[list[float], list[int], list[int]]] = {}
        self._best: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def draw(self, row: int, chance: random.Random) -> int:
        """A token after a context."""
        if row not in self._rows:
            self._rows[row] = self._choices(row)
        cumulative, classes, counts = self._rows[row]
        index = _search(cumulative, chance.random() * cumulative[-1])
        return self.vocabulary.token(classes[index], int(chance.random() * counts[index]))

    def _choices(self, row: int) -> tuple[list[float], list[int], list[int]]:
        """Running sums of the classes' shares, the classes, and how many tokens of each remain."""
        params, sizes = self._params, self.vocabulary.class_sizes_K
        each = self.table_CK[row] - self.vocabulary.log_sizes_K  # of one token of each class
        order = np.lexsort((np.arange(CLASSES), -each))
        order = order[sizes[order] > 0]
        if params.temperature <= 0:
            return [1.0], [int(order[0])], [1]
        shares = np.exp((each[order] - each[order[0]]) / params.temperature)
        counts = sizes[order].astype(np.int64)
        if params.top_k > 0:
            before = np.concatenate(([0], np.cumsum(counts)[:-1]))
            counts = np.clip(min(params.top_k, int(counts.sum())) - before, 0, counts)
        if params.top_p < 1:
            counts = _nucleus(shares, counts, params.top_p)
        kept = counts > 0
        cumulative = np.cumsum(shares[kept] * counts[kept])
        return cumulative.tolist(), order[kept].tolist(), counts[kept].tolist()

    def best(self, row: int, k: int) -> list[tuple[int, float]]:
        """The k likeliest tokens after a context, best first; of equals, the lowest."""
        if (row, k) not in self._best:
            self._best[row, k] = self._likeliest(row, k)
        return self._best[row, k]

    def _likeliest(self, row: int, k: int) -> list[tuple[int, float]]:
        each = self.table_CK[row] - self.vocabulary.log_sizes_K
        found: list[tuple[int, float]] = []
        for class_id in np.lexsort((np.arange(CLASSES), -each)):
            places = min(int(self.vocabulary.class_sizes_K[class_id]), k - len(found))
            logprob = float(np.float32(each[class_id]))
            found += [(self.vocabulary.token(int(class_id), p), logprob) for p in range(places)]
            if len(found) >= k:
                break
        return found

    def logprob(self, row: int, token: int) -> float:
        """Of one token after a context, as it is answered."""
        class_id = 0 if token == EOS else 1 + (token - 1) % (CLASSES - 1)
        found = self.table_CK[row, class_id] - self.vocabulary.log_sizes_K[class_id]
        return float(np.float32(found))


def _search(cumulative: list[float], point: float) -> int:
    low, high = 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) // 2
        if cumulative[middle] > point:
            high = middle
        else:
            low = middle + 1
    return low


def _nucleus(shares: Array, counts: Array, top_p: float) -> Array:
    """How many tokens of each class are among the likeliest that have `top_p` together."""
    masses = shares * counts
    wanted = top_p * masses.sum() - np.concatenate(([0.0], np.cumsum(masses)[:-1]))
    # The token that reaches the limit is kept, so that there is always one.
    kept: Array = np.clip(np.ceil(wanted / shares - 1e-9), 0, counts).astype(np.int64)
    kept[0] = max(kept[0], 1)
    return kept


class _Sequence:
    """One sequence on its way."""

    def __init__(self, seed: str, context: Sequence[int]) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - not for secrets
        self.before, self.last = context
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.stop_reason = ""
        self.told = 0


class RunningSample:
    """A sample that has been admitted."""

    def __init__(self, work: SampleWork, draws: Draws, max_context: int, hits: int) -> None:
        self.work = work
        self._hits = hits
        self._draws = draws
        self._prompt = arithmetic.input_tokens(work.request.prompt)
        params = work.request.sampling_params
        self._seed = work.work_id if params.seed is None else str(params.seed)
        context = [-1, arithmetic.EOS, *self._prompt[-2:].tolist()][-2:]
        self._sequences = [
            _Sequence(f"{self._seed}:{index}", context) for index in range(work.request.num_samples)
        ]
        room = max(1, max_context - len(self._prompt))
        self._most = room if params.max_tokens is None else min(params.max_tokens, room)
        stop: Sequence[str | int]
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        stop = [*stop, EOS] if params.stop is None or stop else []
        self._stop_ids = {item for item in stop if isinstance(item, int)}
        self._stop_texts = tuple(item for item in stop if isinstance(item, str))

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.stop_reason for sequence in self._sequences)

    def step(self, tokens: int) -> list[SampleTokens]:
        """Draw up to so many tokens of each sequence; tells them if the work is streamed."""
        told: list[SampleTokens] = []
        for index, sequence in enumerate(self._sequences):
            for _ in range(tokens):
                if sequence.stop_reason:
                    break
                self._draw(sequence)
            if self.work.is_streamed and len(sequence.tokens) > sequence.told:
                new = slice(sequence.told, None)
                told.append(
                    SampleTokens(
                        work_id=self.work.work_id,
                        sequence=index,
                        tokens=tuple(sequence.tokens[new]),
                        logprobs=tuple(sequence.logprobs[new]),
                    )
                )
                sequence.told = len(sequence.tokens)
        return told

    def _draw(self, sequence: _Sequence) -> None:
        row = arithmetic.next_row(sequence.before, sequence.last)
        token = self._draws.draw(row, sequence.chance)
        sequence.tokens.append(token)
        sequence.rows.append(row)
        sequence.logprobs.append(self._draws.logprob(row, token))
        sequence.before, sequence.last = sequence.last, token
        if token in self._stop_ids or self._ends_text(sequence, token):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= self._most:
            sequence.stop_reason = "length"

    def _ends_text(self, sequence: _Sequence, token: int) -> bool:
        if not self._stop_texts:
            return False
        sequence.text += chr(token) if token <= _LAST_CHARACTER else ""
        return sequence.text.endswith(self._stop_texts)

    def response(self) -> SampleResponse:
        """The whole answer, once it is done."""
        request, rows = self.work.request, arithmetic.context_rows(self._prompt)[:-1]
        k = request.topk_prompt_logprobs
        best = [[], *(self._draws.best(int(row), k) for row in rows)] if k else []
        return SampleResponse(
            [self._sequence(sequence) for sequence in self._sequences],
            prompt_logprobs_np=self._prompt_logprobs(rows),
            topk_prompt_logprobs_np=_matrix(best, k) if k else None,
            target_prompt_logprobs=self._target_logprobs(rows, request.target_prompt_logprobs),
            prompt_cache_hit_tokens=self._hits,
            prompt_alt_tokens=self._alt_tokens(rows, request.prompt_alt_tokens_k),
        )

    def _sequence(self, sequence: _Sequence) -> SampledSequence:
        k = self.work.request.topk_sample_logprobs
        best = [self._draws.best(row, k) for row in sequence.rows] if k else []
        return SampledSequence(
            "stop" if sequence.stop_reason == "stop" else "length",
            tokens_np=np.array(sequence.tokens, np.int32),
            logprobs_np=np.array(sequence.logprobs, np.float32),
            topk_logprobs_np=_matrix(best, k) if k else None,
        )

    def _prompt_logprobs(self, rows: Array) -> Array | None:
        request = self.work.request
        if not request.prompt_logprobs:
            return None
        table, vocabulary = self._draws.table_CK, self._draws.vocabulary
        found = np.full(len(self._prompt), math.nan, np.float32)
        found[1:] = vocabulary.logprobs(table, rows, self._prompt[1:])
        if request.prompt_logprobs_last_n is not None:
            found[: len(found) - request.prompt_logprobs_last_n] = math.nan
        return found

    def _target_logprobs(self, rows: Array, targets: TensorData | None) -> TensorData | None:
        """In the layout of what was asked: dense, or the same cells of a sparse matrix."""
        if targets is None:
            return None
        tokens = targets.numbers.numpy().astype(np.int64)
        if targets.is_sparse:
            counts: Array = np.diff(np.array(targets.sparse_crow_indices, np.int64))
        else:
            counts = np.full(len(rows), (targets.shape or [1, 1])[-1])
        rows = np.repeat(rows, counts)
        found = self._draws.vocabulary.logprobs(self._draws.table_CK, rows, np.maximum(tokens, 0))
        return TensorData(
            np.where(tokens < 0, np.float32(0), found),
            "float32",
            targets.shape,
            targets.sparse_crow_indices,
            targets.sparse_col_indices,
        )

    def _alt_tokens(self, rows: Array, k: int) -> PromptAltTokens | None:
        if not k:
            return None
        chance = random.Random(f"{self._seed}:alternatives")  # noqa: S311 - not for secrets
        params = SamplingParams(temperature=self.work.request.sampling_params.temperature)
        draws = Draws(self._draws.table_CK, self._draws.vocabulary, params)
        repeated = np.repeat(rows, k)
        tokens = np.array([draws.draw(int(row), chance) for row in repeated], np.int64)
        logprobs = draws.vocabulary.logprobs(draws.table_CK, repeated, tokens)
        shape = [len(rows), k]
        return PromptAltTokens(
            TensorData(tokens, "int64", shape), TensorData(logprobs, "float32", shape)
        )


def _matrix(rows: Sequence[list[tuple[int, float]]], k: int) -> TopkLogprobs:
    """Rows as two matrices, filled up with empty cells."""
    filled = [row + [(0, EMPTY_LOGPROB)] * (k - len(row)) for row in rows]
    return TopkLogprobs(
        [token for row in filled for token, _ in row],
        [logprob for row in filled for _, logprob in row],
        shape=(len(rows), k),
    )
