"""`ServiceClient`: a service, and the clients that train and sample on it.

Modules for training, losses and management are imported on first use, which saves a program that
only samples half a megabyte.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tinsmith.client.background import background
from tinsmith.client.embedding import chosen_url
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease, skip_save
from tinsmith.client.losses.traced_losses import TracedLosses
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.client.sampling import SamplingClient, SamplingClientFuture
from tinsmith.client.session import Session
from tinsmith.client.settings import FURTHER_SETTINGS, HOSTED_URL, Secret, settings_from
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import CONSOLE_URL, console_url
from tinsmith.types.runs import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishReasonType,
    ClientSessionFinishSuccess,
)
from tinsmith.types.service import GetServerCapabilitiesResponse
from tinsmith.types.training import (
    CustomLossInputRank,
    LoraConfig,
    OptimizerConfig,
    UnloadModelResponse,
)

if TYPE_CHECKING:
    from tinsmith.client.losses.graph import LossHandle, PerDatumLossFn
    from tinsmith.client.rest import RestClient
    from tinsmith.client.training import TrainingClient, TrainingClientFuture

_log = logging.getLogger(__name__)

FinishStatus = Literal["success", "errored", "interrupted"]

_FINISH: dict[ClientSessionFinishReasonType, ClientSessionFinishReason] = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}


class ServiceClient:
    """A Tinker service. Creating one sends nothing; the first call that needs a session opens it.

    Use it in a `with` block, or call `close()`, to report how the program ended. Otherwise the
    session is finished when its last client is dropped or the interpreter exits.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | Sequence[str] | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        retry: RetryBudget = DEFAULT_BUDGET,
        **unknown: Any,
    ) -> None:
        known = {name: unknown.pop(name) for name in list(unknown) if name in FURTHER_SETTINGS}
        if unknown:
            warnings.warn(
                f"unknown argument of ServiceClient: {', '.join(unknown)}",
                FutureWarning,
                stacklevel=2,
            )
        self._settings = settings_from(
            base_url=chosen_url(base_url, api_key),
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

    def get_console_url(self) -> str | None:
        """The URL of this client's session in its service's console; sends nothing.

        None if the service has no console, as tinsmith's has none. Before the session is open, it
        is the list of sessions.
        """
        session_id = self._lease.session.opened_id
        if session_id is None:
            is_hosted = self._settings.base_url == HOSTED_URL
            return f"{CONSOLE_URL}/sessions" if is_hosted else None
        return console_url(f"sessions/{session_id}", session_id)

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""
        return

    # What the service offers

    def get_server_capabilities(
        self, *, timeout: float | None = None
    ) -> GetServerCapabilitiesResponse:
        """The models that the service offers; blocks for one call and opens no session."""
        return background().run(self._capabilities(), "get_server_capabilities", timeout)

    async def get_server_capabilities_async(
        self, *, timeout: float | None = None
    ) -> GetServerCapabilitiesResponse:
        """As `get_server_capabilities`, without blocking."""
        return await background().start(self._capabilities(), "get_server_capabilities", timeout)

    async def _capabilities(self) -> GetServerCapabilitiesResponse:
        session = self._lease.session
        await session.ready()
        answer: GetServerCapabilitiesResponse = await session.call(
            "get_server_capabilities", r.EmptyRequest()
        )
        return answer

    # Training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClientFuture:
        """Create a model with a new adapter.

        `await` what is returned, or call its `result()`, for the client. It can also be used as the
        client directly. Where no event loop is running, this method then waits until the model can
        be trained, and raises the error if it cannot be created. Where one is running, it returns
        immediately, and the first use waits, blocking the loop, and raises.

        Args:
            base_model: The name of the base model.
            rank: The rank of the adapter.
            seed: Seeds the adapter's initial weights.
            train_mlp: Whether to adapt the feed-forward layers.
            train_attn: Whether to adapt the attention layers.
            train_unembed: Whether to adapt the output layer.
            user_metadata: Stored with the run.
            optimizer: The kind of optimizer; AdamW by default.
            timeout: Seconds after which the call is cancelled.

        Raises:
            ValueError: No part of the model is selected for training.
            RequestFailedError: The service could not create the model.
        """
        from tinsmith.client.model_creation import create_model

        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        work = create_model(self._lease, base_model, lora, user_metadata, optimizer)
        return _training_client(work, "create_lora_training_client", timeout)

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
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """As `create_lora_training_client`, for coroutines: returns the client itself."""
        return await self.create_lora_training_client(
            base_model,
            rank,
            seed,
            train_mlp,
            train_attn,
            train_unembed,
            user_metadata,
            optimizer,
            timeout=timeout,
        )

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClientFuture:
        """Resume from a checkpoint's weights, with new optimizer state.

        Waits as `create_lora_training_client` does.

        Args:
            path: The checkpoint.
            base_model: Replaces the checkpoint's own; its shapes must fit the weights.
            user_metadata: Stored with the new run.
            weights_access_token: A credential of another account that may read the checkpoint.
            optimizer: The kind of optimizer; AdamW by default.
            timeout: Seconds after which the call is cancelled.

        Raises:
            NotFoundError: There is no such checkpoint, or this account may not read it.
            RequestFailedError: The service could not load it.
        """
        work = self._model_from(path, base_model, user_metadata, weights_access_token, optimizer)
        return _training_client(work, "create_training_client_from_state", timeout)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """As `create_training_client_from_state`, for coroutines: returns the client itself."""
        return await self.create_training_client_from_state(
            path, base_model, user_metadata, weights_access_token, optimizer, timeout=timeout
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClientFuture:
        """Resume from a checkpoint's weights and optimizer state.

        Otherwise as `create_training_client_from_state`.
        """
        work = self._model_from(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )
        return _training_client(work, "create_training_client_from_state_with_optimizer", timeout)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`, for coroutines."""
        return await self.create_training_client_from_state_with_optimizer(
            path, base_model, user_metadata, weights_access_token, timeout=timeout
        )

    def unload_model(
        self, model_id: str, *, timeout: float | None = None
    ) -> APIFuture[UnloadModelResponse]:
        """Have the service unload a model, where it offers that; its checkpoints are kept."""
        from tinsmith.client.model_creation import unload_model

        return background().start(unload_model(self._lease, model_id), "unload_model", timeout)

    async def unload_model_async(
        self, model_id: str, *, timeout: float | None = None
    ) -> UnloadModelResponse:
        """As `unload_model`."""
        return await self.unload_model(model_id, timeout=timeout)

    def _model_from(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, Any] | None,
        token: str | None,
        optimizer: OptimizerConfig | None = None,
        *,
        with_optimizer: bool = False,
    ) -> Coroutine[Any, Any, TrainingClient]:
        from tinsmith.client.model_creation import ResumeSource, create_from_state

        source = ResumeSource(
            path=path,
            base_model=base_model,
            user_metadata=user_metadata,
            token=None if token is None else Secret(token),
            optimizer=optimizer,
            with_optimizer=with_optimizer,
        )
        return create_from_state(self._lease, source)

    # Checkpoints

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project, as `RestClient.copy_weights` does."""
        from tinsmith.client.rest import RestClient

        return RestClient(self._lease).copy_weights(
            path,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
            timeout=timeout,
        )

    async def copy_weights_async(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """As `copy_weights`, without blocking."""
        return await self.copy_weights(
            path,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
            timeout=timeout,
        )

    def create_rest_client(self) -> RestClient:
        """Deprecated: create a `RestClient` with the same address and key instead.

        Raises:
            ClosedError: This client was closed.
        """
        from tinsmith.client.rest import RestClient

        warnings.warn(
            "create_rest_client is deprecated; create a RestClient() instead",
            FutureWarning,
            stacklevel=2,
        )
        self._lease.session.check_open()
        return RestClient(self._lease)

    # Losses

    def create_custom_loss(
        self,
        fn: PerDatumLossFn,
        input_ranks: Mapping[str, CustomLossInputRank],
        *,
        timeout: float | None = None,
    ) -> APIFuture[LossHandle]:
        """Create a loss for `TrainingClient.forward_backward_custom` that the service can run.

        The function is traced and checked now. It is uploaded if the service runs such losses;
        otherwise it runs here.

        Args:
            fn: Takes `logprobs` and named `loss_fn_inputs` of one datum, as tensors; returns
                `(loss, metrics)`, with metrics named `custom/<name>:sum` or `custom/<name>:mean`.
            input_ranks: The number of dimensions of each of its parameters.
            timeout: Seconds after which the upload is cancelled.

        Raises:
            ValueError: The function breaks a rule, or this session has it already.
            ImportError: Tracing needs torch, which is not installed.
        """
        from tinsmith.client.losses.graph import make_handle, trace

        traced = trace(fn, input_ranks)
        self._losses.add(traced.key, traced.name)
        work = make_handle(self._lease.session, traced, self._losses)
        return background().start(work, "create_custom_loss", timeout)

    # Sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClientFuture:
        """Create a client that samples from a checkpoint or a base model.

        Waits as `create_lora_training_client` does.

        Args:
            model_path: A `tinker://` path; overrides `base_model`.
            base_model: The name of a base model.
            retry_config: How its samples are retried; None for this client's own budget.
            record_stability_info: Have the service store what `stable_reinforce` needs.
            timeout: Seconds after which the call is cancelled.

        Raises:
            ValueError: Neither is given, or `model_path` is not a path.
        """
        if model_path is None and base_model is None:
            raise ValidationError("pass model_path or base_model")
        if model_path is not None and not model_path.startswith("tinker://"):
            raise ValidationError(
                f"model_path {model_path!r:.200} is not a checkpoint path",
                remedy="checkpoint paths start with tinker://",
            )
        return SamplingClient.create(
            self._lease,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            timeout=timeout,
        ).in_thread()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """As `create_sampling_client`, for coroutines: returns the client itself."""
        return await self.create_sampling_client(
            model_path, base_model, retry_config, record_stability_info, timeout=timeout
        )

    # End

    def close(
        self,
        status: FinishStatus = "success",
        detail: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[None]:
        """Finish the session and close all connections; later calls raise `ClosedError`.

        Only the first call has an effect.

        Args:
            status: How the program ended.
            detail: A short explanation.
            timeout: Seconds to wait for the service.

        Raises:
            ValueError: `status` is not one of the three.
        """
        reason = _FINISH.get(status)
        if reason is None:
            raise ValidationError(f"status must be one of {', '.join(_FINISH)}, not {status!r:.50}")
        return background().start(self._lease.session.close(reason, detail), "close", timeout)

    async def close_async(
        self,
        status: FinishStatus = "success",
        detail: str | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """As `close`, without blocking."""
        await self.close(status, detail, timeout=timeout)

    def __enter__(self) -> Self:
        self._lease.session.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close("success").result()
            return
        try:
            self.close("errored" if issubclass(kind, Exception) else "interrupted").result()
        except TinkerError as failure:  # the block's own error is the one to raise
            _log.warning("could not finish the session: %s", failure)
        except KeyboardInterrupt:  # a second one, while the service saved the models
            skip_save()
            raise

    @property
    def holder(self) -> SessionLease:
        """This client's lease of its session, for programs that need the layer below."""
        return self._lease

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ServiceClient holds connections and cannot be pickled; "
            "create one in the other process"
        )

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._settings.base_url!r})"


def _training_client(
    work: Coroutine[Any, Any, TrainingClient], what: str, timeout: float | None
) -> TrainingClientFuture:
    from tinsmith.client.training import TrainingClientFuture

    return TrainingClientFuture(background().start(work, what, timeout)).in_thread()
