"""What the commands of a model do when their turn comes.

Losses and gradients are `losses.py` over `arithmetic.py`; what is saved goes to
`checkpoint_store.py`, and weights saved for sampling to `sampling.py`. A command that cannot be
done raises, and its future fails with that error.

Knows nothing of numbers, turns or futures.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tinsmith.errors import BadRequestError, ValidationError
from tinsmith.observe.training_metrics import GRAD_NORM, STEP
from tinsmith.testing.account import Usage
from tinsmith.testing.arithmetic import Gradient, Weights
from tinsmith.testing.checkpoint_store import CheckpointStore, Run
from tinsmith.testing.command_order import CommandLine
from tinsmith.testing.commands import Result
from tinsmith.testing.losses import run_loss
from tinsmith.testing.sampling import Samplers
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.requests import (
    CreateCustomLossRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import (
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
)
from tinsmith.types.usage import CheckpointBillingEvent, TrainingBillingEvent


class Model(msgspec.Struct, kw_only=True, eq=False):
    """A model in training."""

    model_id: str
    session_id: str
    line: CommandLine
    run: Run | None = None
    """Known from the start, or once its checkpoint was loaded."""
    weights: Weights | None = None
    gradient: Gradient = {}
    steps: int = 0


class TrainingWork:
    """Does the work of commands, for all models."""

    def __init__(
        self,
        settings: ServiceSettings,
        store: CheckpointStore,
        samplers: Samplers,
        usage: Usage,
    ) -> None:
        self._settings = settings
        self._store = store
        self._samplers = samplers
        self._usage = usage
        self._losses: dict[str, CreateCustomLossRequest] = {}

    def add_loss(self, request: CreateCustomLossRequest) -> str:
        """Keep an uploaded loss; returns its id."""
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        self._losses[loss_id] = request
        return loss_id

    def forward_backward(self, model: Model, request: ForwardBackwardRequest) -> Result:
        """Run a batch, and unless it is forward only add up its gradient."""
        _, weights = equipped(model)
        given = request.forward_backward_input
        gradient: Gradient = {}
        output = run_loss(weights, given, gradient)
        if given.loss_fn == "custom":
            output.metrics.update(self._loss_metrics(model, given.loss_fn_config or {}))
        if not request.forward_only:
            for pair, slope in gradient.items():
                model.gradient[pair] = model.gradient.get(pair, 0.0) + slope
        tokens = sum(len(out["logprobs"].numbers) for out in output.loss_fn_outputs)
        info = TrainingBillingEvent(token_count=tokens)
        self._usage.add(model.session_id, weights.base_model, info)
        return output

    def _loss_metrics(self, model: Model, config: dict[str, float | str]) -> dict[str, float]:
        """The metrics that an uploaded loss names, all 0: it is not run."""
        loss = self._losses.get(str(config.get("loss_id")))
        if loss is None or loss.session_id != model.session_id:
            raise ValidationError(f"there is no loss {config.get('loss_id')!r} in this session")
        returned = loss.graph.nodes[-1].args[0] if loss.graph.nodes else None
        pair = returned.get("tuple") if isinstance(returned, dict) else returned
        named = pair[1] if isinstance(pair, list) and len(pair) == 2 else {}
        metrics = named.get("dict", named) if isinstance(named, dict) else {}
        return dict.fromkeys(metrics, 0.0)

    def optim_step(self, model: Model, request: OptimStepRequest) -> Result:
        """Learn from the gradient, and clear it."""
        _, weights = equipped(model)
        params: Any = request.optim_params
        norm = math.sqrt(math.fsum(slope * slope for slope in model.gradient.values()))
        step = self._settings.learning_speed * float(params.learning_rate)
        clip = float(getattr(params, "grad_clip_norm", 0.0))
        if 0 < clip < norm:
            step *= clip / norm
        weights.learn(model.gradient, step)
        model.gradient = {}
        model.steps += 1
        return OptimStepResponse(metrics={GRAD_NORM: norm, STEP: float(model.steps)})

    def save(self, model: Model, request: SaveWeightsRequest) -> Result:
        """Save training state."""
        run, weights = equipped(model)
        saved = self._store.save(
            run,
            f"weights/{request.path or f'{request.seq_id or 0:06}'}",
            weights,
            ttl_seconds=request.ttl_seconds,
            overwrite=request.overwrite,
            user_metadata=request.user_metadata,
        )
        self._note_checkpoint(model)
        return SaveWeightsResponse(path=saved.checkpoint.tinker_path, type="save_weights")

    def save_for_sampler(self, model: Model, request: SaveWeightsForSamplerRequest) -> Result:
        """Save weights by name, or into a sampler of their own."""
        run, weights = equipped(model)
        if request.path is None:
            number = request.sampling_session_seq_id or 0
            sampler = self._samplers.make(model.session_id, number, weights.copy())
            return SaveWeightsForSamplerResponseInternal(
                sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler"
            )
        saved = self._store.save(
            run,
            f"sampler_weights/{request.path}",
            weights,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        self._note_checkpoint(model)
        return SaveWeightsForSamplerResponseInternal(
            path=saved.checkpoint.tinker_path, type="save_weights_for_sampler"
        )

    def save_external(self, model: Model, request: SaveWeightsExternalRequest) -> Result:
        """Save weights for other programs."""
        run, weights = equipped(model)
        saved = self._store.save(
            run,
            f"external_weights/{request.path}",
            weights,
            ttl_seconds=request.ttl_seconds,
            is_encrypted=bool(request.age_encryption_recipients),
        )
        self._note_checkpoint(model)
        return SaveWeightsExternalResponseInternal(
            path=saved.checkpoint.tinker_path,
            size_bytes=saved.checkpoint.size_bytes,
            type="save_weights_external",
        )

    def load(self, model: Model, request: LoadWeightsRequest) -> Result:
        """Take over the weights of a checkpoint."""
        equipped(model)
        model.weights = self._store.at_path(request.path).weights.copy()
        model.gradient = {}
        return LoadWeightsResponse(path=request.path, model_id=model.model_id, type="load_weights")

    def _note_checkpoint(self, model: Model) -> None:
        run, _ = equipped(model)
        self._usage.add(model.session_id, run.base_model, CheckpointBillingEvent(count=1))


def equipped(model: Model) -> tuple[Run, Weights]:
    """The model's run and weights, once it was made."""
    if model.run is None or model.weights is None:
        raise BadRequestError(f"model {model.model_id} could not be made, or is not ready yet")
    return model.run, model.weights
