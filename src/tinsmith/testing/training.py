"""Models, and the commands submitted to them.

Submissions are answered at once with a future; the work, `training_work.py`, is done when its turn
comes in the model's `CommandLine`. A model's creation is number 0 of its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinsmith.errors import BadRequestError, NotFoundError
from tinsmith.testing.account import Usage, now
from tinsmith.testing.arithmetic import Weights
from tinsmith.testing.checkpoint_store import CheckpointStore, Run
from tinsmith.testing.command_order import CommandLine
from tinsmith.testing.commands import Commands, Result
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.sampling import Samplers
from tinsmith.testing.sessions import Sessions
from tinsmith.testing.settings import ServiceSettings
from tinsmith.testing.training_work import Model, TrainingWork, equipped
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import (
    CreateCustomLossRequest,
    CreateModelRequest,
    LoadWeightsRequest,
    UnloadModelRequest,
)
from tinsmith.types.training import (
    AdamOptimizerConfig,
    CreateCustomLossResponse,
    CreateModelResponse,
    GetInfoResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    UnloadModelResponse,
)

DEFAULT_RANK = 32


class Models:
    """All models of the service."""

    def __init__(
        self,
        settings: ServiceSettings,
        sessions: Sessions,
        commands: Commands,
        store: CheckpointStore,
        samplers: Samplers,
        usage: Usage,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._commands = commands
        self._store = store
        self._work = TrainingWork(settings, store, samplers, usage)
        self._models: dict[str, Model] = {}

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        work = self._work
        return {
            "forward_backward": self._in_order(work.forward_backward),
            "forward": self._in_order(work.forward_backward),
            "optim_step": self._in_order(work.optim_step),
            "save_weights": self._in_order(work.save),
            "save_weights_for_sampler": self._in_order(work.save_for_sampler),
            "save_weights_external": self._in_order(work.save_external),
            "load_weights": self.load,
            "create_model": self.create,
            "unload_model": self.unload,
            "create_custom_loss": self.create_loss,
            "get_info": self.info,
        }

    def spend(self, model_id: str, seq_id: int) -> None:
        """Count a number that was refused as done."""
        if model_id in self._models:
            self._models[model_id].line.spend(seq_id)

    async def close(self) -> None:
        """Stop all lines."""
        for model in self._models.values():
            await model.line.close()

    # Submissions

    def create(self, received: ReceivedRequest) -> UntypedAPIFuture:
        """Make a model with a fresh adapter."""
        request: CreateModelRequest = received.request
        lora = request.lora_config or LoraConfig(rank=DEFAULT_RANK)

        def make(model: Model) -> Result:
            weights = Weights(request.base_model, self._settings.vocabulary_size)
            self._equip(model, weights, lora, received)
            return CreateModelResponse(model_id=model.model_id)

        return self._create(received, make)

    def load(self, received: ReceivedRequest) -> UntypedAPIFuture:
        """Load a checkpoint into a model, or make a model of it."""
        request: LoadWeightsRequest = received.request
        if request.model_id is not None:
            return self._submit(self._work.load, received)
        if request.session_id is None or request.model_seq_id is None:
            raise BadRequestError("load_weights names a model_id, or session_id and model_seq_id")

        def make(model: Model) -> Result:
            saved = self._store.at_path(request.path)
            self._equip(model, saved.weights.copy(), saved.run.lora, received)
            return LoadWeightsResponse(
                path=request.path, model_id=model.model_id, type="load_weights"
            )

        return self._create(received, make)

    def unload(self, received: ReceivedRequest) -> UntypedAPIFuture:
        """Let go of a model."""
        request: UnloadModelRequest = received.request
        known = self._commands.find(received)
        if known is not None:
            return known.answer()
        model = self._model(request.model_id)
        command = self._commands.open(received, model_id=model.model_id)
        answer = UnloadModelResponse(model_id=model.model_id, type="unload_model")
        self._commands.run_soon(command, lambda: answer)
        return command.answer()

    def create_loss(self, received: ReceivedRequest) -> UntypedAPIFuture:
        """Keep an uploaded loss; it can be used in its session."""
        request: CreateCustomLossRequest = received.request
        known = self._commands.find(received)
        if known is not None:
            return known.answer()
        self._sessions.usable(request.session_id)
        loss_id = self._work.add_loss(request)
        command = self._commands.open(received)
        self._commands.run_soon(command, lambda: CreateCustomLossResponse(loss_id=loss_id))
        return command.answer()

    def info(self, received: ReceivedRequest) -> GetInfoResponse:
        """What a model is."""
        model = self._model(received.request.model_id)
        run = equipped(model)[0]
        return GetInfoResponse(
            type="get_info",
            model_data=ModelData(
                arch="arithmetic", model_name=run.base_model, tokenizer_id=run.base_model
            ),
            model_id=model.model_id,
            optimizer_config=run.optimizer,
            is_lora=True,
            lora_rank=run.lora.rank,
            model_name=run.base_model,
        )

    def _create(
        self, received: ReceivedRequest, make: Callable[[Model], Result]
    ) -> UntypedAPIFuture:
        request: CreateModelRequest | LoadWeightsRequest = received.request
        known = self._commands.find(received)
        if known is not None:
            return known.answer()
        session = self._sessions.usable(request.session_id or "")
        model_id = f"{session.session_id}:train:{request.model_seq_id}"
        line = CommandLine(self._settings.gap_wait_s)
        model = Model(model_id=model_id, session_id=session.session_id, line=line)
        self._models[model_id] = model
        session.training_run_ids.append(model_id)
        command = self._commands.open(received, model_id=model_id)
        line.add(0, lambda: self._commands.run(command, lambda: make(model)))
        return command.answer()

    def _in_order(
        self, work: Callable[[Model, Any], Result]
    ) -> Callable[[ReceivedRequest], UntypedAPIFuture]:
        return lambda received: self._submit(work, received)

    def _submit(
        self, work: Callable[[Model, Any], Result], received: ReceivedRequest
    ) -> UntypedAPIFuture:
        """Put a command into its model's line."""
        known = self._commands.find(received)
        if known is not None:
            return known.answer()
        request = received.request
        model = self._model(request.model_id)
        self._sessions.usable(model.session_id)
        number = model.line.place(request.seq_id)
        if model.run is not None:
            model.run.last_request_at = now()
        command = self._commands.open(received, model_id=model.model_id)
        model.line.add(number, lambda: self._commands.run(command, lambda: work(model, request)))
        return command.answer()

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise NotFoundError(f"there is no model {model_id!r}")
        return self._models[model_id]

    def _equip(
        self, model: Model, weights: Weights, lora: LoraConfig, received: ReceivedRequest
    ) -> None:
        request: CreateModelRequest | LoadWeightsRequest = received.request
        model.weights = weights
        model.run = self._store.add_run(
            Run(
                run_id=model.model_id,
                project_id=self._sessions.known(model.session_id).project_id,
                base_model=weights.base_model,
                lora=lora,
                optimizer=request.optimizer_config or AdamOptimizerConfig(),
                user_metadata=request.user_metadata,
                last_request_at=now(),
            )
        )
