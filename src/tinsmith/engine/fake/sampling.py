"""One sample of the fake engine, generated a few tokens per step.

The result depends only on the weights, the request and its seed. Sequence i uses the seed `seed:i`.
If the request has no seed, the work's id is used, so a sample that is rerun after a crash gives the
same tokens. Log-probabilities are those of the model, whatever the temperature.

A stop token ends the sequence, and is its last token. There is no tokenizer here: for stop strings,
a token id stands for the character with that code point. A sequence also ends at the
end-of-sequence token, unless `stop` is `[]`.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence

import numpy as np

from tinsmith.engine.base import BaseModel, SampleTokens, SampleWork
from tinsmith.engine.fake import arithmetic
from tinsmith.engine.fake.arithmetic import CLASSES, EOS, Array, Vocabulary
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

_LAST_CHARACTER = 0x10FFFF


class Draws:
    """Samples tokens from one table, with the sampling parameters of one request."""

    def __init__(self, table_CK: Array, vocabulary: Vocabulary, params: SamplingParams) -> None:
        self.table_CK = table_CK
        self.vocabulary = vocabulary
        self._params = params
        self._rows: dict[int, tuple[list[float], list[int], list[int]]] = {}
        self._best: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def draw(self, row: int, chance: random.Random) -> int:
        """Sample the token after a context."""
        if row not in self._rows:
            self._rows[row] = self._choices(row)
        cumulative, classes, counts = self._rows[row]
        index = bisect.bisect_right(cumulative, chance.random() * cumulative[-1])
        index = min(index, len(classes) - 1)
        return self.vocabulary.token(classes[index], int(chance.random() * counts[index]))

    def _choices(self, row: int) -> tuple[list[float], list[int], list[int]]:
        """Cumulative probabilities of the classes, the classes, and the candidates in each."""
        params, sizes = self._params, self.vocabulary.class_sizes_K
        each = self.table_CK[row] - self.vocabulary.log_sizes_K  # per token of each class
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
        """The k most likely tokens after a context, best first; ties go to the lowest id."""
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
        """The log-probability of one token after a context, rounded as in responses."""
        class_id = 0 if token == EOS else 1 + (token - 1) % (CLASSES - 1)
        found = self.table_CK[row, class_id] - self.vocabulary.log_sizes_K[class_id]
        return float(np.float32(found))


def _nucleus(shares: Array, counts: Array, top_p: float) -> Array:
    """How many tokens of each class are in the nucleus of probability `top_p`."""
    masses = shares * counts
    wanted = top_p * masses.sum() - np.concatenate(([0.0], np.cumsum(masses)[:-1]))
    # The token that reaches the limit is included, so the nucleus is never empty.
    kept: Array = np.clip(np.ceil(wanted / shares - 1e-9), 0, counts).astype(np.int64)
    kept[0] = max(kept[0], 1)
    return kept


class _Sequence:
    """The state of one sequence during generation."""

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

    def __init__(self, work: SampleWork, draws: Draws, model: BaseModel) -> None:
        self.work = work
        self._draws = draws
        self._prompt = arithmetic.input_tokens(work.request.prompt)
        params = work.request.sampling_params
        self._seed = work.work_id if params.seed is None else str(params.seed)
        context = [-1, arithmetic.EOS, *self._prompt[-2:].tolist()][-2:]
        self._sequences = [
            _Sequence(f"{self._seed}:{index}", context) for index in range(work.request.num_samples)
        ]
        room = max(1, model.max_context - len(self._prompt))
        self._most = room if params.max_tokens is None else min(params.max_tokens, room)
        stop: Sequence[str | int]
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        stop = [*stop, *model.eos_tokens] if params.stop is None or stop else []
        self._stop_ids = {item for item in stop if isinstance(item, int)}
        self._stop_texts = tuple(item for item in stop if isinstance(item, str))

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.stop_reason for sequence in self._sequences)

    def step(self, tokens: int) -> list[SampleTokens]:
        """Sample up to `tokens` tokens per sequence; returns them if the work is streamed."""
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
        """The complete response, once all sequences have ended."""
        request, rows = self.work.request, arithmetic.context_rows(self._prompt)[:-1]
        k = request.topk_prompt_logprobs
        best = [[], *(self._draws.best(int(row), k) for row in rows)] if k else []
        return SampleResponse(
            [self._sequence(sequence) for sequence in self._sequences],
            prompt_logprobs_np=self._prompt_logprobs(rows),
            topk_prompt_logprobs_np=_matrix(best, k) if k else None,
            target_prompt_logprobs=self._target_logprobs(rows, request.target_prompt_logprobs),
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
        """The targets' log-probabilities, in the targets' layout: dense or sparse."""
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
    """The rows as two matrices, padded with empty cells."""
    filled = [row + [(0, EMPTY_LOGPROB)] * (k - len(row)) for row in rows]
    return TopkLogprobs(
        [token for row in filled for token, _ in row],
        [logprob for row in filled for _, logprob in row],
        shape=(len(rows), k),
    )
