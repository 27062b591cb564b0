"""The way in: a service, and the clients that train and sample on it.

What is for training, for losses and for management alone is imported by whoever asks for it: a
program that samples has half a megabyte less.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tinsmith.client.background import background
from tinsmith.client.console import session_page
from tinsmith.client.embedding import chosen_url
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease, skip_save
from tinsmith.client.losses.traced_losses import TracedLosses
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.session import Session
from tinsmith.client.settings import FURTHER_SETTINGS, Secret, settings_from
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types import requests as r
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
    from tinsmith.client.training import TrainingClient

_log = logging.getLogger(__name__)

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
        known = {name: unknown.pop(name) for name in list(unknown) if name in FURTHER_SETTINGS}
        if unknown:
            warnings.warn(
                f"ServiceClient does not know {', '.join(unknown)}", FutureWarning, stacklevel=2
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

    def get_console_url(self) -> str:
        """The page of this client's session in the hosted service's console; sends nothing."""
        return session_page(self._lease.session.opened_id)

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""
        return

    # What the service offers

    def get_server_capabilities(
        self, *, timeout: float | None = None
    ) -> GetServerCapabilitiesResponse:
        """Which models the service has; blocks for one call and opens no session."""
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
    ) -> TrainingClient:
        """Make a model with a fresh adapter and wait until it can be trained.

        Args:
            base_model: Its name at the service.
            rank: Of the adapter.
            seed: For the adapter's first weights.
            train_mlp: Whether to adapt the feed-forward layers.
            train_attn: Whether to adapt the attention layers.
            train_unembed: Whether to adapt the output layer.
            user_metadata: Kept with the run.
            optimizer: The optimizer's family; AdamW by default.
            timeout: Seconds after which the call is given up.

        Raises:
            ValueError: Nothing is to be trained.
            RequestFailedError: The service could not make it.
        """
        lora = _lora(rank, seed, train_mlp, train_attn, train_unembed)
        work = self._new_model(base_model, lora, user_metadata, optimizer)
        return background().run(work, "create_lora_training_client", timeout)

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
        """As `create_lora_training_client`, without blocking."""
        lora = _lora(rank, seed, train_mlp, train_attn, train_unembed)
        work = self._new_model(base_model, lora, user_metadata, optimizer)
        return await background().start(work, "create_lora_training_client", timeout)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """Go on from a checkpoint's weights, with fresh optimizer state; blocks until loaded.

        Args:
            path: The checkpoint.
            base_model: Instead of the checkpoint's own; it must fit its weights.
            user_metadata: Kept with the new run.
            weights_access_token: A credential of another account, which may read the checkpoint.
            optimizer: The optimizer's family; AdamW by default.
            timeout: Seconds after which the call is given up.

        Raises:
            NotFoundError: There is no such checkpoint, or it is not for this account.
            RequestFailedError: The service could not load it.
        """
        work = self._model_from(path, base_model, user_metadata, weights_access_token, optimizer)
        return background().run(work, "create_training_client_from_state", timeout)

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
        """As `create_training_client_from_state`, without blocking."""
        work = self._model_from(path, base_model, user_metadata, weights_access_token, optimizer)
        return await background().start(work, "create_training_client_from_state", timeout)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """Go on from a checkpoint exactly where it was, optimizer state included.

        Else as `create_training_client_from_state`.
        """
        work = self._model_from(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )
        return background().run(work, "create_training_client_from_state_with_optimizer", timeout)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`, without blocking."""
        work = self._model_from(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )
        return await background().start(
            work, "create_training_client_from_state_with_optimizer", timeout
        )

    def unload_model(
        self, model_id: str, *, timeout: float | None = None
    ) -> APIFuture[UnloadModelResponse]:
        """Have the service let go of a model, where it offers that; its checkpoints stay."""
        from tinsmith.client.models import unload_model

        return background().start(unload_model(self._lease, model_id), "unload_model", timeout)

    async def unload_model_async(
        self, model_id: str, *, timeout: float | None = None
    ) -> UnloadModelResponse:
        """As `unload_model`."""
        return await self.unload_model(model_id, timeout=timeout)

    def _new_model(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, Any] | None,
        optimizer: OptimizerConfig | None,
    ) -> Coroutine[Any, Any, TrainingClient]:
        from tinsmith.client.models import create_model

        return create_model(self._lease, base_model, lora, user_metadata, optimizer)

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
        from tinsmith.client.models import Source, create_from_state

        source = Source(
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
        """Copy a checkpoint into this client's project; as `RestClient.copy_weights`."""
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
        """Deprecated: make a `RestClient` with the same address and key instead.

        Raises:
            ClosedError: This client was closed.
        """
        from tinsmith.client.rest import RestClient

        warnings.warn(
            "create_rest_client is deprecated; make a RestClient() instead",
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
        """Make a loss for `TrainingClient.forward_backward_custom` that the service can run.

        The function is traced and checked now. If the service runs such losses it is uploaded;
        if not, it runs here.

        Args:
            fn: Takes `logprobs` and named `loss_fn_inputs` of one datum, as tensors; returns
                `(loss, metrics)`, with metrics named `custom/<name>:sum` or `custom/<name>:mean`.
            input_ranks: How many dimensions each of its parameters has.
            timeout: Seconds after which the upload is given up.

        Raises:
            ValueError: The function breaks a rule, or this session has it already.
            ImportError: There is no torch to trace it with.
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
    ) -> SamplingClient:
        """A client that samples from a checkpoint or a base model; blocks for the start-up calls.

        Args:
            model_path: A `tinker://` path; counts before `base_model`.
            base_model: A model's name.
            retry_config: How patient its samples are; None for the client's own budget.
            record_stability_info: Have the service keep what `stable_reinforce` needs.
            timeout: Seconds after which the call is given up.
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
            timeout,
        )

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
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
            timeout,
        )

    # End

    def close(
        self,
        status: FinishStatus = "success",
        detail: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[None]:
        """Finish the session and let go of all connections; later calls are refused.

        Only the first call has an effect.

        Args:
            status: How the program ended.
            detail: A word about it.
            timeout: Seconds after which the service is no longer waited for.

        Raises:
            ValueError: There is no such status.
        """
        reason = _FINISH.get(status)
        if reason is None:
            raise ValidationError(f"status {status!r:.50} is none of {', '.join(_FINISH)}")
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
            _log.warning("the session could not be finished: %s", failure)
        except KeyboardInterrupt:  # another one, while the service saved what was trained
            skip_save()
            raise

    @property
    def holder(self) -> SessionLease:
        """This client's hold on its session, for programs that reach below the surface."""
        return self._lease

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ServiceClient holds connections and is not pickled; make one in the other process"
        )

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._settings.base_url!r})"


def _lora(
    rank: int, seed: int | None, train_mlp: bool, train_attn: bool, train_unembed: bool
) -> LoraConfig:
    return LoraConfig(
        rank=rank,
        seed=seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
    )


def _check_source(model_path: str | None, base_model: str | None) -> None:
    if model_path is None and base_model is None:
        raise ValidationError("give model_path or base_model, to say what to sample from")
    if model_path is not None and not model_path.startswith("tinker://"):
        raise ValidationError(
            f"model_path {model_path!r:.200} is not a checkpoint", remedy="it begins with tinker://"
        )
