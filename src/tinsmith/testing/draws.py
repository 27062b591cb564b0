"""One sample, drawn: sequences, their log-probabilities, and what was asked about the prompt.

Everything follows from the weights, the request and its seed. With a seed in the request, sequence
i is drawn with `seed:i`, so the same request gives the same tokens in any sampler with the same
weights; without one, the request's id takes the place of the seed. Log-probabilities are those of
the model, whatever the temperature.

A token reads as the character with its number, which is how stop texts are found. The token that
completes a stop is part of the sequence. A sequence also ends at `eos_token`; with `stop` `[]` it
ends at nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

from tinsmith.errors import BadRequestError
from tinsmith.testing.arithmetic import Weights
from tinsmith.testing.losses import context_tokens
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import EMPTY_LOGPROB, TopkLogprobs

_LAST_CHARACTER = 0x10FFFF

Row = list[tuple[int, float]]
IsStop = Callable[[list[int], str], bool]


def check_sample(request: SampleRequest) -> None:
    """Refuse what cannot be drawn.

    Raises:
        BadRequestError: A number is out of its range, or an option lacks the one it belongs to.
    """
    params, positions = request.sampling_params, len(context_tokens(request.prompt)) - 1
    last_n, targets = request.prompt_logprobs_last_n, request.target_prompt_logprobs
    problems = {
        "num_samples must be at least 1": request.num_samples < 1,
        "the prompt is empty": positions < 0,
        "max_tokens must be at least 1": params.max_tokens is not None and params.max_tokens < 1,
        "temperature must not be negative": params.temperature < 0,
        "top_p must lie above 0 and at most at 1": not 0 < params.top_p <= 1,
        "top_k must be -1 or at least 1": params.top_k < -1 or params.top_k == 0,
        "prompt_logprobs_last_n needs prompt_logprobs": last_n is not None
        and not request.prompt_logprobs,
        f"prompt_logprobs_last_n must lie in 1…{positions}": last_n is not None
        and not 1 <= last_n <= positions,
        f"target_prompt_logprobs must have {positions} rows": targets is not None
        and (targets.shape or [0])[0] != positions,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise BadRequestError(problem)


def sample(
    weights: Weights, request: SampleRequest, settings: ServiceSettings, seed: str
) -> SampleResponse:
    """Draw what was asked for."""
    prompt = context_tokens(request.prompt)
    seed = seed if request.sampling_params.seed is None else str(request.sampling_params.seed)
    sequences = [
        _sequence(weights, prompt[-1], request, settings, random.Random(f"{seed}:{index}"))  # noqa: S311
        for index in range(request.num_samples)
    ]
    k = request.topk_prompt_logprobs
    rows: list[Row] = [[]]  # nothing comes before the first token
    rows += [weights.best(context, k) for context in prompt[:-1]] if k else []
    return SampleResponse(
        sequences,
        prompt_logprobs_np=_prompt_logprobs(weights, prompt, request),
        topk_prompt_logprobs_np=_matrix(rows, k) if k else None,
        target_prompt_logprobs=_target_logprobs(weights, prompt, request.target_prompt_logprobs),
        prompt_alt_tokens=_alt_tokens(weights, prompt, request, seed),
    )


def _sequence(
    weights: Weights,
    context: int,
    request: SampleRequest,
    settings: ServiceSettings,
    chance: random.Random,
) -> SampledSequence:
    params = request.sampling_params
    is_stop = _stop_test(params, settings.eos_token)
    contexts, tokens, text = [context], list[int](), ""
    stops = False
    while not stops and len(tokens) < (params.max_tokens or settings.max_tokens):
        token = weights.draw(
            contexts[-1],
            chance,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        tokens.append(token)
        contexts.append(token)
        text += chr(token) if token <= _LAST_CHARACTER else ""
        stops = is_stop(tokens, text)
    k = request.topk_sample_logprobs
    rows = [weights.best(context, k) for context in contexts[:-1]] if k else []
    return SampledSequence(
        "stop" if stops else "length",
        tokens_np=tokens,
        logprobs_np=weights.logprobs(zip(contexts, tokens, strict=False)),
        topk_logprobs_np=_matrix(rows, k) if k else None,
    )


def _stop_test(params: SamplingParams, eos_token: int) -> IsStop:
    stop: list[str | int] | None
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is None or stop:
        stop = [*(stop or []), eos_token]
    ids = {item for item in stop if isinstance(item, int)}
    texts = tuple(item for item in stop if isinstance(item, str))
    return lambda tokens, text: tokens[-1] in ids or (bool(texts) and text.endswith(texts))


def _prompt_logprobs(
    weights: Weights, prompt: list[int], request: SampleRequest
) -> list[float] | None:
    if not request.prompt_logprobs:
        return None
    found = weights.logprobs(itertools.pairwise(prompt))
    left_out = len(found) - (request.prompt_logprobs_last_n or len(found))
    return [math.nan] * (1 + left_out) + found[left_out:]


def _target_logprobs(
    weights: Weights, prompt: list[int], targets: TensorData | None
) -> TensorData | None:
    """In the layout of what was asked: dense, or the same cells of a sparse matrix."""
    if targets is None:
        return None
    width = (targets.shape or [1])[-1]
    places = range(len(targets.numbers))
    if targets.is_sparse:
        starts = targets.sparse_crow_indices or []
        rows = [row for row in range(len(starts) - 1) for _ in range(starts[row], starts[row + 1])]
    else:
        rows = [place // width for place in places]
    tokens: list[int] = targets.data
    found = weights.logprobs((prompt[row], max(tokens[place], 0)) for place, row in enumerate(rows))
    logprobs = [0.0 if token < 0 else lp for token, lp in zip(tokens, found, strict=True)]
    return TensorData(
        logprobs,
        "float32",
        targets.shape,
        targets.sparse_crow_indices,
        targets.sparse_col_indices,
    )


def _alt_tokens(
    weights: Weights, prompt: list[int], request: SampleRequest, seed: str
) -> PromptAltTokens | None:
    k = request.prompt_alt_tokens_k
    if not k:
        return None
    chance = random.Random(f"{seed}:alternatives")  # noqa: S311 - not for secrets
    temperature = request.sampling_params.temperature
    pairs = [
        (context, weights.draw(context, chance, temperature=temperature))
        for context in prompt[:-1]
        for _ in range(k)
    ]
    shape = [len(prompt) - 1, k]
    return PromptAltTokens(
        TensorData([token for _, token in pairs], "int64", shape),
        TensorData(weights.logprobs(pairs), "float32", shape),
    )


def _matrix(rows: list[Row], k: int) -> TopkLogprobs:
    """Rows as two matrices, filled up with empty cells."""
    filled = [row + [(0, EMPTY_LOGPROB)] * (k - len(row)) for row in rows]
    return TopkLogprobs(
        [token for row in filled for token, _ in row],
        [logprob for row in filled for _, logprob in row],
        shape=(len(rows), k),
    )
