"""Training a model: the calls of `TrainingClient`, each of which returns a future at once.

Those that save and load are in `saves.py`; how a call is sent is in `model_calls.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.client.background import background
from tinsmith.client.console import training_run_page
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.losses.custom import CustomLoss, start_custom_pass
from tinsmith.client.model_calls import present
from tinsmith.client.passes import checked_data, pass_bodies, run_pass, token_counter
from tinsmith.client.poller import Poll
from tinsmith.client.queue_state import QueueState, QueueStateLogger, StateTeller
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.saves import SavingCalls
from tinsmith.client.tokenization.of_model import TokenizerOfModel
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
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

    Calls run on the server in the order in which they are made here, whoever waits for which
    result. The `_async` twin of a call submits it just the same and gives the same future: await
    it twice, once to submit and once for the result.
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
        """Run data through the model and take the loss, without gradients.

        Args:
            data: At least one datum. Arrays are read now: later changes to them are not sent.
            loss_fn: The loss's name.
            loss_fn_config: The loss's settings.
            timeout: Seconds for the whole call, its result included. When they are over it is given
                up wherever it is, and the next call goes on. Every call here takes one.

        Raises:
            ValueError: There is no data.
            APITimeoutError: From the future, if its time was over first.
            RequestFailedError: From the future, if the server could not run it.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True, timeout=timeout)

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
        """Run data through the model and add up the gradients of the loss; else as `forward`.

        Losses are sums over tokens: a batch in two calls gives the same gradients as in one. To
        watch training, print the result's `loss_per_token`; its `loss` is a sum over the tokens of
        a datum.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False, timeout=timeout)

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
        """Run data through the model and add up the gradients of a loss of your own.

        Returns at once. The loss runs on a thread of its own, once, when the log-probabilities
        have come; calls made later run after its gradients have arrived. It must not wait for a
        call of this client, which would wait for it.

        Args:
            data: At least one datum with `target_tokens`. They are read now; the loss gets `data`
                itself.
            loss_fn: A function `(data, logprobs) -> (loss, metrics)` of one tensor of
                log-probabilities per datum; or an object whose `gradients(data, logprobs)` gives
                `(loss, gradients, metrics)` in lists or arrays, without torch; or a handle of
                `ServiceClient.create_custom_loss`.
            loss_type_input: Deprecated; `"logprobs"` is all that it may be.
            timeout: As in `forward`, for both passes and the loss. A loss that is running then runs
                on, for nobody.

        Returns:
            The metrics of the loss, with `loss:sum` its own value, and `surrogate_loss:sum` that
            of the pass which carried its gradient.

        Raises:
            ValueError: A datum lacks an input; from the future, if it has no gradient.
            ImportError: The loss needs torch, which is not there.
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

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None,
        *,
        forward_only: bool,
        timeout: float | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        kind = "Forward" if forward_only else "ForwardBackward"
        name = "forward" if forward_only else "forward_backward"
        submitter = self._submitter
        data = checked_data(data, loss_fn)
        bodies = pass_bodies(submitter, data, loss_fn, loss_fn_config, forward_only=forward_only)
        place = submitter.line.take_place()
        work = run_pass(submitter, place, bodies, kind, token_counter(data))
        return submitter.start(work, [place], f"{name} of {self.model_id}", timeout)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        timeout: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Apply the gathered gradients, then clear them. Runs after every call made earlier.

        Args:
            optim_params: Settings for this step alone.
            adam_params: The same, under the name that older programs use.
            timeout: As in `forward`.
        """
        if optim_params is not None and adam_params is not None:
            raise ValidationError("give optim_params or adam_params, not both")
        params = adam_params if optim_params is None else optim_params
        if not isinstance(params, AdamParams | OptimParamsBase):
            raise TypeError(f"optim_step needs AdamParams or the like, not {type(params).__name__}")
        return self._submit(
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
    ) -> SamplingClient:
        """Save the weights as they are now and wait for a client that samples from them.

        Args:
            name: Deprecated, and ignored: the weights are saved without one, for this client.
            retry_config: How patient its samples are; None for the client's own budget.
            record_stability_info: Have the server keep what `stable_reinforce` needs.
            timeout: As in `forward`.
        """
        _warn_of_name(name)
        saved = self._save_for_sampling(timeout).result()
        return SamplingClient(
            self._lease,
            present(saved.sampling_session_id, "sampling_session_id"),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """As `save_weights_and_get_sampling_client`, without blocking."""
        _warn_of_name(name)
        saved = await self._save_for_sampling(timeout)
        return SamplingClient(
            self._lease,
            present(saved.sampling_session_id, "sampling_session_id"),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def _save_for_sampling(self, timeout: float | None) -> APIFuture[Any]:
        session = self._lease.session
        sampler_number = session.next_number("sampling_session")
        return self._submit(
            "save_weights_for_sampler",
            "SaveWeightsForSampler",
            lambda number: r.SaveWeightsForSamplerRequest(
                model_id=self.model_id, sampling_session_seq_id=sampler_number, seq_id=number
            ),
            timeout=timeout,
        )

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """A client that samples from a saved checkpoint."""
        return background().run(
            SamplingClient.open(
                self._lease,
                model_path=model_path,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
            "create_sampling_client",
            timeout,
        )

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """As `create_sampling_client`, without blocking."""
        return await background().start(
            SamplingClient.open(
                self._lease,
                model_path=model_path,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
            "create_sampling_client",
            timeout,
        )

    # About the model

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when a poll for a result tells the state of the queue; logs that it is paused.

        Replace it to be told. It runs on the thread for callbacks.
        """
        self._queue_logger.on_queue_state_change(queue_state, queue_state_reason)

    def unload_model(self, *, timeout: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Have the service let go of this model, where it offers that; its checkpoints stay.

        It leaves after every call made earlier. Wait for their results first: the service may drop
        what has not run yet.

        Args:
            timeout: Seconds after which the call is given up.
        """
        submitter = self._submitter
        place = submitter.line.take_place()

        async def work() -> UnloadModelResponse:
            async with place.turn():
                submitted: UntypedAPIFuture = await submitter.session.call(
                    "unload_model", r.UnloadModelRequest(model_id=self.model_id)
                )
            poll = Poll(submitter.session, submitted.request_id, "UnloadModel")
            gone: UnloadModelResponse = await poll.result()
            return gone

        return submitter.start(work(), [place], f"unload_model of {self.model_id}", timeout)

    async def unload_model_async(
        self, *, timeout: float | None = None
    ) -> APIFuture[UnloadModelResponse]:
        """As `unload_model`."""
        return self.unload_model(timeout=timeout)

    def get_console_url(self) -> str:
        """The page of this training run in the hosted service's console."""
        return training_run_page(self.model_id)

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""
        return

    def get_info(self, *, timeout: float | None = None) -> GetInfoResponse:
        """What the model is; blocks for one call."""
        return background().run(self._get_info(), "get_info", timeout)

    async def get_info_async(self, *, timeout: float | None = None) -> GetInfoResponse:
        """As `get_info`, without blocking."""
        return await background().start(self._get_info(), "get_info", timeout)

    def get_tokenizer(self, *, timeout: float | None = None) -> Any:
        """The model's tokenizer; asks the service once which one it is, and loads it once.

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
            "a TrainingClient numbers its calls in one place and is not pickled; save its state "
            "and make another from that there, or pass a SamplingClient"
        )

    def __repr__(self) -> str:
        return f"TrainingClient(model_id={self.model_id!r})"


def _warn_of_name(name: str | None) -> None:
    if name is not None:
        warnings.warn(
            "the name of save_weights_and_get_sampling_client is deprecated and ignored; to keep "
            "the weights, use save_weights_for_sampler and create_sampling_client",
            DeprecationWarning,
            stacklevel=3,
        )
