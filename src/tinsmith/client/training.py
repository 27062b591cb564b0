"""Training a model: the calls of `TrainingClient`, each of which returns a future at once.

Those that save and load are in `training_saves.py`; `submission.py` sends them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.client.background import background
from tinsmith.client.client_futures import ClientFuture
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.losses.custom import CustomLoss, start_custom_pass
from tinsmith.client.poller import Poll
from tinsmith.client.sampling import SamplingClient, SamplingClientFuture
from tinsmith.client.submission import present
from tinsmith.client.tokenization.of_model import TokenizerOfModel
from tinsmith.client.training_saves import SavingCalls
from tinsmith.client.waits import QueueState, QueueStateLogger, StateTeller
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import console_url
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import Datum
from tinsmith.types.training import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    LossFnType,
    OptimParams,
    OptimParamsBase,
    OptimStepResponse,
    UnloadModelResponse,
)

LossConfig = Mapping[str, float | str]


class TrainingClient(SavingCalls):
    """One model in training.

    Calls run on the server in the order in which they are made. The `_async` variant of a call
    submits it in the same way and returns the same future: await it twice, once to submit and once
    for the result.
    """

    def __init__(self, lease: SessionLease, model_id: str) -> None:
        super().__init__(lease, model_id)
        self._tokenizer = TokenizerOfModel()
        self._queue_logger = QueueStateLogger(model_id, "Training")
        self._submitter.observer = StateTeller(self)

    # Passes

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Run a forward pass and compute the loss, without gradients. Returns immediately.

        Args:
            data: At least one datum. Arrays are read now: later changes to them are not sent.
            loss_fn: The name of the loss.
            loss_fn_config: The settings of the loss.
            timeout: Seconds for the whole call, its result included. Then it is cancelled, and the
                next call runs. Every call of this class takes one.

        Raises:
            ValueError: There is no data.
            APITimeoutError: From the future, if the time was up.
            RequestFailedError: From the future, if the server could not run the pass.
        """
        return self._submitter.start_pass(
            data, loss_fn, loss_fn_config, forward_only=True, timeout=timeout
        )

    async def forward_async(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`."""
        return self.forward(data, loss_fn, loss_fn_config, timeout=timeout)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Run a forward and backward pass, adding to the gradients; otherwise as `forward`.

        Losses are sums over tokens: a batch in two calls gives the same gradients as in one. To
        watch training, print the result's `loss_per_token`; its `loss` is a sum over the tokens of
        a datum.
        """
        return self._submitter.start_pass(
            data, loss_fn, loss_fn_config, forward_only=False, timeout=timeout
        )

    async def forward_backward_async(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`."""
        return self.forward_backward(data, loss_fn, loss_fn_config, timeout=timeout)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        *,
        loss_type_input: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Run a forward and backward pass with a loss function of your own.

        Returns immediately. The loss runs once, on a separate thread, when the log-probabilities
        have arrived; later calls run after its gradients have been sent. It must not wait for a
        call of this client, which would wait for it.

        Args:
            data: At least one datum with `target_tokens`. They are read now; the loss gets `data`
                itself.
            loss_fn: A function `(data, logprobs) -> (loss, metrics)` of one tensor of
                log-probabilities per datum; or an object whose `gradients(data, logprobs)` gives
                `(loss, gradients, metrics)` in lists or arrays, without torch; or a handle of
                `ServiceClient.create_custom_loss`.
            loss_type_input: Deprecated; only `"logprobs"` is allowed.
            timeout: As in `forward`, for both passes and the loss. A loss that is running then
                continues, and its result is dropped.

        Returns:
            The metrics of the loss; `loss:sum` is its value, `surrogate_loss:sum` that of the
            backward pass that carried its gradient.

        Raises:
            ValueError: A datum lacks an input; from the future, if it has no gradient.
            ImportError: The loss needs torch, which is not installed.
            Exception: From the future, whatever the loss raised.
        """
        return start_custom_pass(self._submitter, data, loss_fn, loss_type_input, timeout)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        *,
        loss_type_input: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward_custom`."""
        return start_custom_pass(self._submitter, data, loss_fn, loss_type_input, timeout)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        timeout: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients, then reset them to zero. Returns immediately.

        The step runs after every earlier call on this client.

        Args:
            optim_params: Learning rate and other settings for this step only.
            adam_params: The same, under the name that older programs use.
            timeout: As in `forward`.
        """
        if optim_params is not None and adam_params is not None:
            raise ValidationError("pass optim_params or adam_params, not both")
        params = adam_params if optim_params is None else optim_params
        if not isinstance(params, AdamParams | OptimParamsBase):
            raise TypeError(
                f"optim_step takes AdamParams or DimuonParams, not {type(params).__name__}"
            )
        return self._submitter.start_call(
            "optim_step",
            "OptimStep",
            lambda number: r.OptimStepRequest(
                model_id=self.model_id, seq_id=number, optim_params=params
            ),
            timeout=timeout,
        )

    async def optim_step_async(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        timeout: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """As `optim_step`."""
        return self.optim_step(optim_params, adam_params=adam_params, timeout=timeout)

    # Sampling from what was trained

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClientFuture:
        """Save the current weights and create a client that samples from them.

        The save is queued now, after every earlier call. The rest is as in
        `ServiceClient.create_sampling_client`.

        Args:
            name: Deprecated and ignored: the weights are saved without a name, for this client.
            retry_config: How its samples are retried; None for this client's own budget.
            record_stability_info: Have the server store what `stable_reinforce` needs.
            timeout: As in `forward`.
        """
        _warn_of_name(name)
        return self._save_for_sampling(retry_config, record_stability_info, timeout).in_thread()

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """As `save_weights_and_get_sampling_client`, for coroutines: returns the client itself."""
        _warn_of_name(name)
        return await self._save_for_sampling(retry_config, record_stability_info, timeout)

    def _save_for_sampling(
        self, retry_config: Any, record_stability_info: bool, timeout: float | None
    ) -> SamplingClientFuture:
        lease = self._lease
        sampler_number = lease.session.next_number("sampling_session")
        saving = self._submitter.start_call(
            "save_weights_for_sampler",
            "SaveWeightsForSampler",
            lambda number: r.SaveWeightsForSamplerRequest(
                model_id=self.model_id, sampling_session_seq_id=sampler_number, seq_id=number
            ),
            lambda saved: SamplingClient(
                lease,
                present(saved.sampling_session_id, "sampling_session_id"),
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
            timeout=timeout,
        )
        return SamplingClientFuture(saving)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClientFuture:
        """Create a client that samples from a saved checkpoint.

        Otherwise as `ServiceClient.create_sampling_client`.
        """
        return SamplingClient.create(
            self._lease,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            timeout=timeout,
        ).in_thread()

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """As `create_sampling_client`, for coroutines: returns the client itself."""
        return await self.create_sampling_client(
            model_path, retry_config, record_stability_info, timeout=timeout
        )

    # About the model

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when a poll brings the state of the queue; logs that it is paused.

        Replace it to handle the state yourself. It runs on the thread for callbacks.
        """
        self._queue_logger.on_queue_state_change(queue_state, queue_state_reason)

    def unload_model(self, *, timeout: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Have the service unload this model, where it offers that; its checkpoints are kept.

        It is sent after every earlier call. Wait for their results first: the service may drop
        calls that have not run yet.

        Args:
            timeout: Seconds after which the call is cancelled.
        """
        submitter = self._submitter
        ticket = submitter.queue.take_ticket()

        async def work() -> UnloadModelResponse:
            async with ticket.first():
                submitted: UntypedAPIFuture = await submitter.session.call(
                    "unload_model", r.UnloadModelRequest(model_id=self.model_id)
                )
            poll = Poll(submitter.session, submitted.request_id, "UnloadModel")
            gone: UnloadModelResponse = await poll.result()
            return gone

        return submitter.start(work(), [ticket], "unload_model", timeout)

    async def unload_model_async(
        self, *, timeout: float | None = None
    ) -> APIFuture[UnloadModelResponse]:
        """As `unload_model`."""
        return self.unload_model(timeout=timeout)

    def get_console_url(self) -> str | None:
        """The URL of this training run in its service's console; None if that has no console."""
        return console_url(f"training_runs/{self.model_id}", self.model_id)

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""
        return

    def get_info(self, *, timeout: float | None = None) -> GetInfoResponse:
        """The model's base model and settings; blocks for one call."""
        return background().run(self._get_info(), "get_info", timeout)

    async def get_info_async(self, *, timeout: float | None = None) -> GetInfoResponse:
        """As `get_info`, without blocking."""
        return await background().start(self._get_info(), "get_info", timeout)

    def get_tokenizer(self, *, timeout: float | None = None) -> Any:
        """The model's tokenizer; the service is asked once which one it is, and it is loaded once.

        Raises:
            TokenizerError: It could not be found or loaded.
        """
        return background().run(self._tokenizer.get_async(self._get_info), "get_tokenizer", timeout)

    async def get_tokenizer_async(self, *, timeout: float | None = None) -> Any:
        """As `get_tokenizer`, without blocking."""
        return await background().start(
            self._tokenizer.get_async(self._get_info), "get_tokenizer", timeout
        )

    async def _get_info(self) -> GetInfoResponse:
        info: GetInfoResponse = await self._lease.session.call(
            "get_info", r.GetInfoRequest(model_id=self.model_id)
        )
        return info

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainingClient cannot be pickled, because it numbers its calls; save its state and "
            "create another client from it there, or pass a SamplingClient"
        )

    def __repr__(self) -> str:
        return f"TrainingClient(model_id={self.model_id!r})"


class TrainingClientFuture(ClientFuture[TrainingClient], TrainingClient):
    """A `TrainingClient` that is being created.

    `await` it or call `result()` to get the client; using it as the client directly works too.
    """

    CLIENT_ATTRIBUTES = frozenset(
        {"_lease", "_queue_logger", "_submitter", "_tokenizer", "model_id"}
    )

    def __reduce__(self) -> Any:
        return TrainingClient.__reduce__(self)


def _warn_of_name(name: str | None) -> None:
    if name is not None:
        warnings.warn(
            "the argument name of save_weights_and_get_sampling_client is deprecated and "
            "ignored; to keep "
            "the weights, use save_weights_for_sampler and create_sampling_client",
            DeprecationWarning,
            stacklevel=3,
        )
