"""The way in: a service, and the clients that train and sample on it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.loss_graph import (
    LossHandle,
    PerDatumLossFn,
    TracedLosses,
    make_handle,
    trace,
)
from tinsmith.client.poller import Poll
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.session import Session, SessionLease
from tinsmith.client.settings import ClientSettings, settings_from
from tinsmith.client.training import TrainingClient
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.runs import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishReasonType,
    ClientSessionFinishSuccess,
    WeightsInfoResponse,
)
from tinsmith.types.service import GetServerCapabilitiesResponse
from tinsmith.types.training import (
    AdamOptimizerConfig,
    CreateModelResponse,
    CustomLossInputRank,
    LoraConfig,
    OptimizerConfig,
)

FinishStatus = Literal["success", "errored", "interrupted"]

_FINISH: dict[ClientSessionFinishReasonType, ClientSessionFinishReason] = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}


class ServiceClient:
    """A Tinker service. Making one sends nothing; the first call that needs a session opens it.

    Use it with `with`, or call `close()`, to tell the service how the program ended. If neither is
    done, the session is finished when the last client of it is dropped or the interpreter exits.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        retry: RetryBudget = DEFAULT_BUDGET,
        **unknown: Any,
    ) -> None:
        known = {
            name: unknown.pop(name)
            for name in list(unknown)
            if name in ClientSettings.__struct_fields__
        }
        if unknown:
            warnings.warn(
                f"ServiceClient does not know {', '.join(unknown)}", FutureWarning, stacklevel=2
            )
        self._settings = settings_from(
            base_url=base_url,
            api_key=api_key,
            default_headers=default_headers_overrides,
            project_id=project_id,
            user_metadata=user_metadata,
            display_name=display_name,
            retry=retry,
            **known,
        )
        self._lease = SessionLease(Session(self._settings))
        self._losses = TracedLosses()

    # What the service offers

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Which models the service has; blocks for one call and opens no session."""
        return background().run(self._capabilities(), "get_server_capabilities")

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """As `get_server_capabilities`, without blocking."""
        return await background().start(self._capabilities(), "get_server_capabilities")

    async def _capabilities(self) -> GetServerCapabilitiesResponse:
        session = self._lease.session
        await session.ready()
        answer: GetServerCapabilitiesResponse = await session.call(
            "get_server_capabilities", r.EmptyRequest()
        )
        return answer

    # Training

    def create_lora_training_client(
        self, base_model: str, *args: Any, **kwargs: Any
    ) -> TrainingClient:
        """Make a model with a fresh adapter and wait until it can be trained.

        As `create_lora_training_client_async`.
        """
        return background().run(
            self._create_model(base_model, *args, **kwargs), "create_lora_training_client"
        )

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Make a model with a fresh adapter.

        Args:
            base_model: Its name at the service.
            rank: Of the adapter.
            seed: For the adapter's first weights.
            train_mlp: Whether to adapt the feed-forward layers.
            train_attn: Whether to adapt the attention layers.
            train_unembed: Whether to adapt the output layer.
            user_metadata: Kept with the run.
            optimizer: The optimizer's family; AdamW by default.

        Raises:
            ValueError: Nothing is to be trained.
            RequestFailedError: The service could not make it.
        """
        return await background().start(
            self._create_model(
                base_model,
                rank,
                seed,
                train_mlp,
                train_attn,
                train_unembed,
                user_metadata,
                optimizer,
            ),
            "create_lora_training_client",
        )

    async def _create_model(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        if not (train_mlp or train_attn or train_unembed):
            raise ValidationError(
                "train_mlp, train_attn and train_unembed are all False",
                remedy="an adapter needs at least one of them",
            )
        session = self._lease.session
        request = r.CreateModelRequest(
            session_id=await session.session_id(),
            model_seq_id=session.next_number("model"),
            base_model=base_model,
            user_metadata=user_metadata,
            lora_config=LoraConfig(
                rank=rank,
                seed=seed,
                train_unembed=train_unembed,
                train_mlp=train_mlp,
                train_attn=train_attn,
            ),
            optimizer_config=optimizer or AdamOptimizerConfig(),
        )
        submitted: UntypedAPIFuture = await session.call("create_model", request)
        made: CreateModelResponse = await Poll(
            session, submitted.request_id, "CreateModel"
        ).result()
        return TrainingClient(self._lease, made.model_id)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Go on from a checkpoint's weights, with fresh optimizer state; blocks until loaded."""
        return background().run(
            self._from_state(path, base_model, user_metadata, weights_access_token, optimizer),
            "create_training_client_from_state",
        )

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """As `create_training_client_from_state`, without blocking."""
        return await background().start(
            self._from_state(path, base_model, user_metadata, weights_access_token, optimizer),
            "create_training_client_from_state",
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Go on from a checkpoint exactly where it was, optimizer state included."""
        return background().run(
            self._from_state(
                path, base_model, user_metadata, weights_access_token, with_optimizer=True
            ),
            "create_training_client_from_state_with_optimizer",
        )

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`, without blocking."""
        return await background().start(
            self._from_state(
                path, base_model, user_metadata, weights_access_token, with_optimizer=True
            ),
            "create_training_client_from_state_with_optimizer",
        )

    async def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, Any] | None,
        token: str | None,
        optimizer: OptimizerConfig | None = None,
        *,
        with_optimizer: bool = False,
    ) -> TrainingClient:
        session = self._lease.session
        await session.ready()
        info: WeightsInfoResponse = await session.call(
            "get_weights_info_by_tinker_path", r.WeightsInfoRequest(tinker_path=path)
        )
        if not info.is_lora or info.lora_rank is None:
            raise ValidationError(f"{path} is not a checkpoint of an adapter")
        client = await self._create_model(
            base_model or info.base_model,
            info.lora_rank,
            None,
            info.train_mlp is not False,
            info.train_attn is not False,
            info.train_unembed is not False,
            user_metadata,
            optimizer or info.optimizer_config,
        )
        await client.load_weights(path, token, with_optimizer=with_optimizer)
        return client

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Make a loss for `TrainingClient.forward_backward_custom` that the service can run.

        The function is traced and checked now. If the service runs such losses it is uploaded;
        if not, it runs here.

        Args:
            fn: Takes `logprobs` and named `loss_fn_inputs` of one datum, as tensors; returns
                `(loss, metrics)`, with metrics named `custom/<name>:sum` or `custom/<name>:mean`.
            input_ranks: How many dimensions each of its parameters has.

        Raises:
            ValueError: The function breaks a rule, or this session has it already.
            ImportError: There is no torch to trace it with.
        """
        traced = trace(fn, input_ranks)
        self._losses.add(traced.key, traced.name)
        work = make_handle(self._lease.session, traced, self._losses)
        return background().start(work, "create_custom_loss")

    # Sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from a checkpoint or a base model; blocks for the start-up calls.

        Args:
            model_path: A `tinker://` path; counts before `base_model`.
            base_model: A model's name.
            retry_config: Taken for existing programs, and not used yet.
            record_stability_info: Have the service keep what `stable_reinforce` needs.
        """
        _check_source(model_path, base_model)
        return background().run(
            SamplingClient.open(
                self._lease,
                model_path=model_path,
                base_model=base_model,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
            "create_sampling_client",
        )

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """As `create_sampling_client`, without blocking."""
        _check_source(model_path, base_model)
        return await background().start(
            SamplingClient.open(
                self._lease,
                model_path=model_path,
                base_model=base_model,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
            "create_sampling_client",
        )

    # End

    def close(self, status: FinishStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Finish the session and let go of all connections; later calls are refused.

        Args:
            status: How the program ended.
            detail: A word about it.
        """
        work = self._lease.session.close(_FINISH[status], detail)
        return background().start(work, "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close("success").result()
        else:
            self.close("errored" if issubclass(kind, Exception) else "interrupted").result()

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._settings.base_url!r})"


def _check_source(model_path: str | None, base_model: str | None) -> None:
    if model_path is None and base_model is None:
        raise ValidationError("give model_path or base_model, to say what to sample from")
    if model_path is not None and not model_path.startswith("tinker://"):
        raise ValidationError(
            f"model_path {model_path!r:.200} is not a checkpoint", remedy="it begins with tinker://"
        )
