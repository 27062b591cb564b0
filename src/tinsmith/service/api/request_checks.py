"""Validation of names, numbers, models and adapters in requests.

Each refusal is a 400 that names the field, its value and what is allowed. What only shows when a
command runs is not checked here. `data_checks.py` validates data and prompts.
"""

from __future__ import annotations

import math
from typing import Any

from tinsmith.checkpoints.encryption import check_recipients
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import BaseModel
from tinsmith.errors import BadRequestError, ValidationError, shown
from tinsmith.service.api.api_call import ApiCall
from tinsmith.service.ledger.records import is_storable
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.requests import (
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    LoraConfig,
    OptimizerConfig,
)

LONGEST_TEXT = 1000
MOST_TAGS = 100
MOST_METADATA_BYTES = 64 * 1024
MOST_METADATA_LEVELS = 50
LARGEST_SENT = 2**62
"""The highest number that a client may give to a command. The service appends commands of its own
behind them, and must have numbers left for these."""
LARGEST_CREATED = 2**31 - 1
"""The highest number that a session may give to a model, a sampler or a loss."""
SHORTEST_TTL_S = 3600
LONGEST_TTL_S = 10 * 365 * 24 * 3600
LONGEST_PROJECT = 200


def refuse(field: str, value: object, bound: str) -> BadRequestError:
    """The error for a field with an invalid value."""
    return BadRequestError(f"{field} is {shown(value)}; {bound}")


def check_texts(*fields: tuple[str, str | None]) -> None:
    """Check names and notes: short, and such that every database can store them."""
    for name, value in fields:
        if value is None:
            continue
        if len(value) > LONGEST_TEXT:
            raise BadRequestError(
                f"{name} has {len(value)} characters; the maximum is {LONGEST_TEXT}"
            )
        if not is_storable(value):
            raise refuse(name, value, "it must not contain NUL or lone surrogates")


def check_metadata(name: str, metadata: dict[str, Any] | None) -> None:
    """Check metadata, which is stored: its nesting and its size."""
    if not metadata:
        return
    if not _is_flat(metadata, MOST_METADATA_LEVELS):
        raise BadRequestError(f"{name} is nested in more than {MOST_METADATA_LEVELS} levels")
    size = len(repr(metadata))
    if size > MOST_METADATA_BYTES:
        raise BadRequestError(
            f"{name} takes about {size} bytes; the maximum is {MOST_METADATA_BYTES}"
        )
    if not _is_storable(metadata):
        raise BadRequestError(f"{name} must not contain NUL or lone surrogates")


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(one, levels - 1) for one in inner)


def _is_storable(value: Any) -> bool:
    if isinstance(value, str):
        return is_storable(value)
    if isinstance(value, dict):
        return all(map(_is_storable, value)) and all(map(_is_storable, value.values()))
    if isinstance(value, list):
        return all(map(_is_storable, value))
    return True


def check_number(field: str, value: int, most: int = LARGEST_SENT) -> None:
    """Check a number that a client counts with."""
    if not 0 <= value <= most:
        raise refuse(field, value, f"it must be 0 to {most}")


# Models


def base_model(call: ApiCall, name: str, field: str = "base_model") -> BaseModel:
    """The base model of this name."""
    found = call.context.base_models.get(name)
    if found is None:
        known = ", ".join(sorted(call.context.base_models)[:20])
        raise refuse(
            field,
            name,
            f"this service has {known or 'no models'}; add models with `tinsmith serve --model "
            "NAME`, or in the embedded service with TINSMITH_SERVE_MODELS",
        )
    return found


def is_same_model(call: ApiCall, one: str, other: str) -> bool:
    """Whether two names refer to one base model."""
    return _first_name(call, one) == _first_name(call, other)


def _first_name(call: ApiCall, name: str) -> str:
    found = call.context.base_models.get(name)
    return name if found is None else found.alias_of or found.name


def check_lora(model: BaseModel, lora: LoraConfig) -> None:
    """Check the shape of an adapter."""
    if not 1 <= lora.rank <= model.max_rank:
        raise refuse("lora_config.rank", lora.rank, f"it must be 1 to {model.max_rank}")
    if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
        raise BadRequestError(
            "lora_config trains nothing; one of train_unembed, train_mlp and train_attn must be set"
        )
    if lora.seed is not None and not -(2**63) <= lora.seed < 2**63:
        raise refuse("lora_config.seed", lora.seed, "it must fit into 64 bits")


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Check the kind of optimizer."""
    if not isinstance(optimizer, AdamOptimizerConfig | DimuonOptimizerConfig):
        raise refuse("optimizer_config.type", optimizer.type, "it must be adamw or dimuon")


def check_step(request: OptimStepRequest, optimizer: OptimizerConfig) -> None:
    """Check the parameters of one step against the optimizer of the model."""
    params = request.optim_params
    if isinstance(optimizer, AdamOptimizerConfig) != isinstance(params, AdamParams):
        raise BadRequestError(
            f"the model was created with optimizer {optimizer.type!r}, but the step has parameters "
            f"of {getattr(params, 'type', 'adamw')!r}"
        )
    if isinstance(params, AdamParams):
        _check_adam(params)
    elif not isinstance(params, DimuonParams):
        raise refuse("optimizer_params.type", params.type, "it must be dimuon")


def _check_adam(params: AdamParams) -> None:
    bounds = {
        "learning_rate": (0.0, math.inf),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    }
    for name, (least, below) in bounds.items():
        value = getattr(params, name)
        if not (math.isfinite(value) and least <= value < below):
            bound = f"it must be at least {least:g}" + (
                f" and below {below:g}" if below < 2 else ""
            )
            raise refuse(f"adam_params.{name}", value, bound)
    if not math.isfinite(params.grad_clip_norm):
        raise refuse("adam_params.grad_clip_norm", params.grad_clip_norm, "it must be finite")


# Checkpoints


def check_ttl(seconds: int | None) -> None:
    """Check how long a checkpoint is kept; None is for ever."""
    if seconds is not None and not SHORTEST_TTL_S <= seconds <= LONGEST_TTL_S:
        raise refuse("ttl_seconds", seconds, f"it must be {SHORTEST_TTL_S} to {LONGEST_TTL_S}")


def expiry(ttl_seconds: int | None, now: float) -> float | None:
    """When something with this time to live expires; raises as `check_ttl`."""
    check_ttl(ttl_seconds)
    return None if ttl_seconds is None else now + ttl_seconds


def check_project(field: str, project: str) -> None:
    """Check the name of a project."""
    is_named = 1 <= len(project) <= LONGEST_PROJECT
    if not is_named or not project.isprintable() or not is_storable(project):
        raise refuse(field, project, f"it must have 1 to {LONGEST_PROJECT} printable characters")


def check_path(path: str) -> ParsedCheckpointTinkerPath:
    """Parse a checkpoint's path, of a kind that clients can name."""
    try:
        CheckpointPath.parse(path)
        return ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValidationError as exc:
        raise BadRequestError(str(exc)) from exc


def check_name(run_id: str, kind: str, name: str) -> None:
    """Check the name of a new checkpoint."""
    try:
        CheckpointPath(run_id, kind, name)
    except ValidationError as exc:
        raise BadRequestError(f"path: {exc}") from exc


def check_save(
    run_id: str,
    request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
) -> None:
    """Check a save of any kind."""
    check_ttl(request.ttl_seconds)
    check_metadata("user_metadata", request.user_metadata)
    kind = _KINDS[type(request)]
    if request.path is not None:
        check_name(run_id, kind, request.path)
    if isinstance(request, SaveWeightsExternalRequest) and request.age_encryption_recipients:
        _check_recipients(request.age_encryption_recipients)
    if isinstance(request, SaveWeightsForSamplerRequest):
        _check_sampler_save(request)


def _check_recipients(recipients: list[str]) -> None:
    try:
        check_recipients(recipients)
    except ValidationError as exc:
        raise BadRequestError(str(exc)) from exc


def _check_sampler_save(request: SaveWeightsForSamplerRequest) -> None:
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise BadRequestError(
            "save_weights_for_sampler takes either a path or a sampling_session_seq_id"
        )
    if request.sampling_session_seq_id is not None:
        check_number("sampling_session_seq_id", request.sampling_session_seq_id, LARGEST_CREATED)


_KINDS: dict[type, str] = {
    SaveWeightsRequest: "weights",
    SaveWeightsForSamplerRequest: "sampler_weights",
    SaveWeightsExternalRequest: "external_weights",
}
