"""Validation of training data and prompts, before anything runs.

With numpy, which every engine needs, arrays are checked in place: the largest token id of a body is
found without making Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tinsmith.engine.base import BaseModel
from tinsmith.errors import BadRequestError, TinkerError
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.request_checks import refuse
from tinsmith.types.buffers import Numbers
from tinsmith.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SamplingParams
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import ForwardBackwardInput

try:  # at the start: importing it takes half a second, too long for the first request
    import numpy as np
except ModuleNotFoundError:
    np = None  # type: ignore[assignment]

_WEIGHED = frozenset({"target_tokens", "logprobs", "advantages"})
LOSS_INPUTS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset({"target_tokens", "weights"}),
    "importance_sampling": _WEIGHED,
    "ppo": _WEIGHED,
    "cispo": _WEIGHED,
    "dro": _WEIGHED,
    "gspo": _WEIGHED,
    "stable_reinforce": _WEIGHED,
    "custom": frozenset({"target_tokens"}),
}
"""The inputs that each loss needs."""
_CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})
LOSS_SETTINGS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "dro": frozenset({"beta"}),
    "gspo": _CLIPS,
    "stable_reinforce": frozenset({"kl_coeff"}) | _CLIPS,
    "custom": frozenset({"loss_id"}),
}
"""The options of each loss."""
PER_POSITION = frozenset(
    {
        "target_tokens",
        "weights",
        "logprobs",
        "advantages",
        "clip_low_threshold",
        "clip_high_threshold",
        "sequence_ratio_mask",
    }
)
"""Inputs with one row for each position of the model's input."""

MOST_STOPS = 64
LONGEST_STOP = 1000
_NO_TARGET = -1


def check_pass(given: ForwardBackwardInput, model: BaseModel, settings: ApiSettings) -> str | None:
    """Check a pass over data; returns the id of the custom loss that it names, if any."""
    if not given.data:
        raise BadRequestError("data is empty; there must be at least one datum")
    if len(given.data) > settings.most_datums:
        raise refuse(
            "the number of data", len(given.data), f"the maximum is {settings.most_datums}"
        )
    loss_id = _check_loss(given)
    tokens = cells = 0
    for index, datum in enumerate(given.data):
        try:
            tokens += _check_datum(datum, given.loss_fn, model, settings)
            cells += max(map(_cells, datum.loss_fn_inputs.values()))
        except TinkerError as exc:
            raise BadRequestError(f"data[{index}].{exc}") from exc
    if tokens > settings.most_pass_tokens:
        raise refuse(
            "the number of tokens in data", tokens, f"the maximum is {settings.most_pass_tokens}"
        )
    if cells > settings.most_pass_targets:  # sparse tensors are small until they are made dense
        raise refuse(
            "the number of cells in data", cells, f"the maximum is {settings.most_pass_targets}"
        )
    return loss_id


def _check_loss(given: ForwardBackwardInput) -> str | None:
    if given.loss_fn not in LOSS_INPUTS:
        raise refuse("loss_fn", given.loss_fn, f"it must be one of {', '.join(LOSS_INPUTS)}")
    known = LOSS_SETTINGS[given.loss_fn]
    config = given.loss_fn_config or {}
    for name, value in config.items():
        if name not in known:
            may = ", ".join(sorted(known)) or "nothing"
            raise BadRequestError(f"loss_fn_config has {name!r:.80}; {given.loss_fn} accepts {may}")
        if name != "loss_id" and not (isinstance(value, int | float) and math.isfinite(value)):
            raise refuse(f"loss_fn_config[{name!r}]", value, "it must be a finite number")
    if given.loss_fn != "custom":
        return None
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str):
        raise refuse("loss_fn_config['loss_id']", loss_id, "it must be the id of a custom loss")
    return loss_id


def _check_datum(datum: Datum, loss_fn: str, model: BaseModel, settings: ApiSettings) -> int:
    """Check one example; returns how many positions it has."""
    length = check_input("model_input", datum.model_input, model)
    if length == 0:
        raise BadRequestError("model_input is empty")
    if length > model.max_context:
        raise refuse(
            "model_input: the number of tokens", length, f"the maximum is {model.max_context}"
        )
    inputs = datum.loss_fn_inputs
    missing = LOSS_INPUTS[loss_fn] - inputs.keys()
    if missing:
        raise BadRequestError(
            f"loss_fn_inputs has no {', '.join(sorted(missing))}, which {loss_fn} needs"
        )
    for name, tensor in inputs.items():
        _check_tensor(f"loss_fn_inputs[{name!r:.80}]", tensor, settings)
        # A custom loss defines its own inputs, for instance one number for the whole datum.
        if name in PER_POSITION and (loss_fn != "custom" or name == "target_tokens"):
            _check_rows(name, tensor, length)
    if loss_fn != "custom":
        _check_same_shape(inputs)
    targets = inputs["target_tokens"]
    _check_kind("target_tokens", targets, "int64")
    _check_ids("loss_fn_inputs['target_tokens']", targets.numbers, model.vocabulary)
    return length


def _check_tensor(field: str, tensor: TensorData, settings: ApiSettings) -> None:
    cells = _cells(tensor)
    if cells > settings.most_targets:
        raise refuse(
            f"{field}: the number of cells", cells, f"the maximum is {settings.most_targets}"
        )
    if tensor.dtype == "float32" and not _is_finite(tensor.numbers):
        raise BadRequestError(f"{field} contains NaN or infinity; all numbers must be finite")
    if tensor.is_sparse and _has_a_cell_twice(tensor):  # one of the two would be lost
        raise BadRequestError(f"{field} has two numbers for one cell in its sparse_col_indices")


def _cells(tensor: TensorData) -> int:
    """The number of cells of the dense tensor."""
    return math.prod(tensor.shape) if tensor.shape is not None else len(tensor.numbers)


def _check_rows(name: str, tensor: TensorData, length: int) -> None:
    shape = tensor.shape if tensor.shape is not None else [len(tensor.numbers)]
    if len(shape) not in (1, 2) or shape[0] != length:
        raise BadRequestError(
            f"loss_fn_inputs[{name!r}] has the shape {shape}; model_input has {length} tokens"
        )


def _check_same_shape(inputs: dict[str, TensorData]) -> None:
    targets = inputs["target_tokens"]
    shape = targets.shape if targets.shape is not None else [len(targets.numbers)]
    for name in ("weights", "logprobs", "advantages"):
        tensor = inputs.get(name)
        if tensor is None:
            continue
        _check_kind(name, tensor, "float32")
        other = tensor.shape if tensor.shape is not None else [len(tensor.numbers)]
        if other != shape:
            raise BadRequestError(
                f"loss_fn_inputs[{name!r}] has the shape {other}, and target_tokens {shape}"
            )


def _check_kind(name: str, tensor: TensorData, dtype: str) -> None:
    if tensor.dtype != dtype:
        raise refuse(f"loss_fn_inputs[{name!r}].dtype", tensor.dtype, f"it must be {dtype}")


# Inputs


def check_input(field: str, given: ModelInput, model: BaseModel) -> int:
    """Check a model's input; returns how many tokens it has."""
    length = 0
    for index, chunk in enumerate(given.chunks):
        name = f"{field}.chunks[{index}]"
        if isinstance(chunk, EncodedTextChunk):
            _check_ids(f"{name}.tokens", chunk.numbers, model.vocabulary)
        else:
            _check_media(name, chunk, model)
        length += chunk.length
    return length


def _check_media(
    name: str, chunk: ImageChunk | ImageAssetPointerChunk | DmelChunk, model: BaseModel
) -> None:
    if not model.takes_images:
        raise refuse(f"{name}.type", chunk.type, f"{model.name} accepts encoded_text only")
    if isinstance(chunk, ImageAssetPointerChunk):
        raise refuse(f"{name}.type", chunk.type, "this service does not fetch images")
    if chunk.length < 0:
        raise refuse(f"{name}.expected_tokens", chunk.length, "it must not be negative")


def _check_ids(field: str, numbers: Numbers, vocabulary: int) -> None:
    least, most = _bounds(numbers)
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise refuse(f"{field}: a token id", wrong, f"it must be 0 to {vocabulary - 1}")


def _bounds(numbers: Numbers) -> tuple[int, int]:
    if not len(numbers):
        return 0, 0
    array = _as_array(numbers)
    if array is not None:
        return int(array.min()), int(array.max())
    view = numbers.view()
    return min(view), max(view)


def _is_finite(numbers: Numbers) -> bool:
    array = _as_array(numbers)
    if array is None:
        return all(map(math.isfinite, numbers.view()))
    # A float64 sum of float32 numbers cannot overflow: it is finite if they all are.
    return math.isfinite(float(array.sum(dtype="float64")))


def _has_a_cell_twice(tensor: TensorData) -> bool:
    starts, columns = tensor.row_starts, tensor.columns
    assert starts is not None and columns is not None and tensor.shape is not None
    array = _as_array(columns)
    if array is None:
        places = starts.view()
        rows = [columns.view()[start:end] for start, end in pairwise(places)]
        return any(len(set(row)) < len(row) for row in rows)
    counts = np.diff(np.frombuffer(starts.memory, dtype=starts.kind))
    cells = np.repeat(np.arange(len(counts)) * tensor.shape[1], counts) + array
    is_sorted = bool((np.diff(cells) > 0).all())  # the usual case
    return not is_sorted and len(np.unique(cells)) < len(cells)


def _as_array(numbers: Numbers) -> Any:
    """The numbers as a numpy view; None if they are few, or numpy is not installed."""
    if len(numbers) <= _FEW or np is None:
        return None
    return np.frombuffer(numbers.memory, dtype=numbers.kind)


_FEW = 64
"""Up to this many, plain Python is faster."""


# Samples


def check_sample(request: SampleRequest, model: BaseModel, settings: ApiSettings) -> None:
    """Check a sample against the model that it is drawn from."""
    if not 1 <= request.num_samples <= settings.most_samples:
        raise refuse("num_samples", request.num_samples, f"it must be 1 to {settings.most_samples}")
    length = check_input("prompt", request.prompt, model)
    if length == 0:
        raise BadRequestError("prompt is empty; there must be at least one token")
    _check_params(request.sampling_params, length, model)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        most = min(settings.most_topk, model.vocabulary)
        if not 0 <= getattr(request, name) <= most:
            raise refuse(name, getattr(request, name), f"it must be 0 to {most}")
    _check_last_n(request, length)
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, length, model, settings)


def _check_params(params: SamplingParams, length: int, model: BaseModel) -> None:
    if length > model.max_context:
        raise refuse(
            "prompt: the number of tokens", length, f"{model.name} has {model.max_context}"
        )
    # To get the logprobs of a whole sequence, clients ask for one token after it.
    room = max(1, model.max_context - length)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise refuse("sampling_params.max_tokens", params.max_tokens, "it must be at least 1")
    if params.max_tokens is not None and params.max_tokens > room:
        raise refuse(
            "sampling_params.max_tokens",
            params.max_tokens,
            f"the prompt has {length} tokens, and the context of {model.name} {model.max_context}",
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise refuse("sampling_params.temperature", params.temperature, "it must be 0 or more")
    if not 0 < params.top_p <= 1:
        raise refuse("sampling_params.top_p", params.top_p, "it must be above 0 and at most 1")
    if params.top_k < -1:
        raise refuse("sampling_params.top_k", params.top_k, "it must be -1 (no limit) or more")
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise refuse("sampling_params.seed", params.seed, "it must fit into 64 bits")
    _check_stop(params.stop, model)


def _check_stop(stop: str | list[str | int] | None, model: BaseModel) -> None:
    if stop is None:
        return
    stops: Iterable[str | int] = [stop] if isinstance(stop, str) else stop
    kinds = {type(one) for one in stops}
    if len(kinds) > 1:
        raise BadRequestError("sampling_params.stop mixes texts and token ids; use one kind")
    if not isinstance(stop, str) and len(stop) > MOST_STOPS:
        raise refuse(
            "the number of sampling_params.stop", len(stop), f"the maximum is {MOST_STOPS}"
        )
    for one in stops:
        if isinstance(one, str) and not 0 < len(one) <= LONGEST_STOP:
            raise refuse(
                "sampling_params.stop", one, f"it must have 1 to {LONGEST_STOP} characters"
            )
        if isinstance(one, int) and not 0 <= one < model.vocabulary:
            raise refuse("sampling_params.stop", one, f"it must be 0 to {model.vocabulary - 1}")


def _check_last_n(request: SampleRequest, length: int) -> None:
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise BadRequestError("prompt_logprobs_last_n needs prompt_logprobs")
    if not 1 <= last_n <= max(1, length - 1):
        raise refuse("prompt_logprobs_last_n", last_n, f"it must be 1 to {max(1, length - 1)}")


def _check_targets(
    targets: TensorData, length: int, model: BaseModel, settings: ApiSettings
) -> None:
    field = "target_prompt_logprobs"
    if targets.dtype != "int64" or targets.shape is None or len(targets.shape) != 2:
        raise BadRequestError(f"{field} must be int64 of two dimensions, with its shape")
    if targets.shape[0] != length - 1:
        raise BadRequestError(
            f"{field} has the shape {targets.shape}; the prompt has {length} tokens, so there must "
            f"be {length - 1} rows"
        )
    _check_tensor(field, targets, settings)
    least, most = _bounds(targets.numbers)
    if least < _NO_TARGET or most >= model.vocabulary:
        wrong = least if least < _NO_TARGET else most
        raise refuse(f"{field}: a token id", wrong, f"it must be -1 to {model.vocabulary - 1}")
