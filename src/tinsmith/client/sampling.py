"""`SamplingClient`: samples from a base model or from saved weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinsmith.client.background import background
from tinsmith.client.client_futures import ClientFuture
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease, shared_leases
from tinsmith.client.limits import Limiter
from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.many import ManySamples
from tinsmith.client.samples.sampler import Sampler
from tinsmith.client.session import Session
from tinsmith.client.settings import ClientSettings
from tinsmith.client.tokenization.of_model import TokenizerOfModel
from tinsmith.client.waits import QueueState, QueueStateLogger, StateTeller
from tinsmith.errors import AuthenticationError, IncompleteResultError, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.buffers import Numbers
from tinsmith.types.inputs import ModelInput
from tinsmith.types.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleResponse,
    SamplingParams,
)
from tinsmith.types.tensors import TensorData

if TYPE_CHECKING:
    from tinsmith.client.samples.retry_config import RetryConfig
    from tinsmith.client.samples.stream import AsyncSampleStream, SampleStream


class SamplingClient(ManySamples):
    """Samples from a base model or from saved weights. Any number of samples may be in flight."""

    def __init__(
        self,
        lease: SessionLease,
        sampling_session_id: str,
        *,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        clone_id: int | None = 0,
    ) -> None:
        self._lease = lease
        self._sampler = Sampler(
            lease.session,
            sampling_session_id,
            clone_id,
            observer=StateTeller(self),
            retry_config=retry_config,
        )
        self._tokenizer = TokenizerOfModel()
        self._queue_logger = QueueStateLogger(sampling_session_id, "Sampling")
        self._sampling_session_id = sampling_session_id
        self._retry_config = retry_config
        self._record_stability_info = record_stability_info

    @classmethod
    async def open(
        cls,
        lease: SessionLease,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Have the service create a sampler, unless one is named. For the background loop."""
        session = lease.session
        if sampling_session_id is not None:
            await session.session_id()
            return cls(
                lease,
                sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        if session.is_adopted:
            raise ValidationError(
                "a client made from a sampler handle cannot create further samplers",
                remedy="create a ServiceClient, and the sampler with that",
            )
        opened: CreateSamplingSessionResponse = await session.call(
            "create_sampling_session",
            r.CreateSamplingSessionRequest(
                session_id=await session.session_id(),
                sampling_session_seq_id=session.next_number("sampling_session"),
                base_model=base_model,
                model_path=model_path,
            ),
        )
        return cls(
            lease,
            opened.sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    @staticmethod
    def create(
        holder: SessionLease,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        timeout: float | None = None,
    ) -> SamplingClientFuture:
        """Create a client from the `holder` of another one; prefer `create_sampling_client`.

        Returns immediately.

        Args:
            holder: The `holder` of a client.
            model_path: Weights to sample from.
            base_model: A base model to sample from.
            sampling_session_id: An existing sampler.
            retry_config: How its samples are retried.
            record_stability_info: Have the service store notes on each sample.
            timeout: Seconds for the whole call.
        """
        opening = SamplingClient.open(
            holder,
            model_path=model_path,
            base_model=base_model,
            sampling_session_id=sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )
        return SamplingClientFuture(background().start(opening, "create_sampling_client", timeout))

    @property
    def retry_budget(self) -> RetryBudget:
        """How long and how often this client's samples are retried."""
        return self._sampler.retrier.budget

    def get_telemetry(self) -> None:
        """None: tinsmith sends no telemetry. For programs that ask."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw sequences that continue a prompt. Returns immediately.

        Args:
            prompt: The text to continue.
            num_samples: How many sequences to draw; they share the prefill of the prompt.
            sampling_params: Temperature, stop sequences and the like.
            include_prompt_logprobs: Also return the log-probability of each prompt token.
            topk_prompt_logprobs: Also the k most likely tokens at each prompt position.
            topk_sample_logprobs: Also the k most likely tokens at each sampled position.
            target_prompt_logprobs: Also the log-probabilities of these tokens at each prompt
                position: an int64 matrix of len(prompt) - 1 rows, -1 for no token.
            prompt_alt_tokens_k: Also k tokens drawn at each prompt position; the future fails with
                `IncompleteResultError` where the service does not support it.
            prompt_logprobs_last_n: Only for the last n prompt positions; fails in the same way.
            timeout: Seconds for the whole call, pauses of the service included; then the sample is
                cancelled and fails with `APITimeoutError`.

        Raises:
            ValueError: An argument is invalid.
        """
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        return self._sampler.start(request, self._lease, self._named("sample"), timeout)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> SampleResponse:
        """As `sample`, for coroutines: returns the result itself."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            timeout=timeout,
        )

    def sample_stream(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> SampleStream:
        """Draw sequences and yield their tokens as they are drawn.

        Nothing is sent before the first event is requested. Each event has new tokens of one
        sequence; the last one has the whole `response`, which `result()` also returns. After a
        lost connection the stream resumes where it was. Leaving the loop, closing the stream or
        dropping it cancels the sample on the server.

        If the service does not stream, all tokens come at the end.

        Args:
            prompt: The text to continue.
            num_samples: How many sequences to draw.
            sampling_params: Temperature, stop sequences and the like.
            timeout: Seconds from now to the end of the stream; then it fails with
                `APITimeoutError`.
            options: Further arguments of `sample`.

        Raises:
            ValueError: An argument is invalid.
        """
        from tinsmith.client.samples.stream import SampleStream
        from tinsmith.client.samples.stream_reader import StreamReader

        request = self._request(prompt, num_samples, sampling_params, **options)
        reader = StreamReader(self._sampler, self._lease, request)
        return SampleStream(reader, self._named("stream"), timeout)

    def sample_stream_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncSampleStream:
        """As `sample_stream`, for `async for`; not to be awaited itself."""
        from tinsmith.client.samples.stream import AsyncSampleStream
        from tinsmith.client.samples.stream_reader import StreamReader

        request = self._request(prompt, num_samples, sampling_params, **options)
        reader = StreamReader(self._sampler, self._lease, request)
        return AsyncSampleStream(reader, self._named("stream"), timeout)

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[list[float | None]]:
        """The log-probability of each prompt token given those before it; the first is None."""
        request = self._request(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )

        async def work() -> list[float | None]:
            logprobs = (await self._sampler.start(request, self._lease)).prompt_logprobs
            if logprobs is None:
                raise IncompleteResultError(message="the service sent no prompt logprobs")
            return logprobs

        return background().start(work(), self._named("logprobs"), timeout)

    async def compute_logprobs_async(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> list[float | None]:
        """As `compute_logprobs`, for coroutines: returns the result itself."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n, timeout=timeout)

    def get_base_model(self, *, timeout: float | None = None) -> str:
        """The name of the base model; blocks for one call."""
        return background().run(self._get_base_model(), "get_sampler", timeout)

    async def get_base_model_async(self, *, timeout: float | None = None) -> str:
        """As `get_base_model`, without blocking."""
        return await background().start(self._get_base_model(), "get_sampler", timeout)

    def get_tokenizer(self, *, timeout: float | None = None) -> Any:
        """The model's tokenizer; the service is asked once which one it is, and it is loaded once.

        Raises:
            TokenizerError: It could not be found or loaded.
        """
        work = self._tokenizer.get_async(self._get_names)
        return background().run(work, "get_tokenizer", timeout)

    async def get_tokenizer_async(self, *, timeout: float | None = None) -> Any:
        """As `get_tokenizer`, without blocking."""
        work = self._tokenizer.get_async(self._get_names)
        return await background().start(work, "get_tokenizer", timeout)

    async def _get_base_model(self) -> str:
        return (await self._get_names())[0]

    async def _get_names(self) -> tuple[str, str | None]:
        sampler: GetSamplerResponse = await self._lease.session.call(
            "get_sampler", r.GetSamplerRequest(sampler_id=self._sampling_session_id)
        )
        return sampler.base_model, sampler.tokenizer_id

    def _check_sample(
        self, num_samples: int, sampling_params: SamplingParams, options: dict[str, Any]
    ) -> None:
        self._request(ModelInput.empty(), num_samples, sampling_params, **options)

    def _named(self, what: str) -> str:
        return f"{what} of {self._sampling_session_id}"

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> r.SampleRequest:
        _check_options(
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            include_prompt_logprobs,
        )
        return r.SampleRequest(
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=_own(target_prompt_logprobs),
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when a poll brings the state of the queue; logs that it is paused.

        Replace it to handle the state yourself. It runs on the thread for callbacks.
        """
        self._queue_logger.on_queue_state_change(queue_state, queue_state_reason)

    # Other processes

    def get_sampler_handle(self, *, timeout: float | None = None) -> str:
        """This sampler's handle as text, for `from_sampler_handle` in another process.

        It contains this client's settings, but no API key, no proxy password and no header whose
        name suggests a secret.
        """
        session = self._lease.session
        from tinsmith.client.samples.sampler_handle import SamplerHandle, shareable

        return SamplerHandle(
            **shareable(session.settings),
            session_id=background().run(session.session_id(), "get_sampler_handle", timeout),
            sampling_session_id=self._sampling_session_id,
            record_stability_info=self._record_stability_info,
            flags=session.flags.model_dump(),
            dynamic_flags=session.dynamic_flags.model_dump(),
        ).to_text()

    @staticmethod
    def from_sampler_handle(
        handle: str,
        *,
        api_key: str | None = None,
        retry_config: RetryConfig | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        proxy: str | None = None,
        ca_file: str | None = None,
        unix_socket: str | None = None,
    ) -> SamplingClient:
        """A client for the sampler of a handle, with the settings of the client that made it.

        Args:
            handle: The text from `get_sampler_handle`.
            api_key: The credential to use here; by default from this process's environment.
            retry_config: How its samples are retried.
            default_headers_overrides: Headers for every request, in addition to the handle's,
                which contains none whose name suggests a secret.
            proxy: Replaces the handle's, which has no password.
            ca_file: Replaces the handle's; another machine has other files.
            unix_socket: Replaces the handle's.
        """
        from tinsmith.client.samples.sampler_handle import SamplerHandle

        named = SamplerHandle.from_text(handle)
        settings = named.client_settings(
            api_key=api_key,
            default_headers=default_headers_overrides,
            proxy=proxy,
            ca_file=ca_file,
            unix_socket=unix_socket,
        )

        def adopt(settings: ClientSettings) -> Session:
            session = Session(settings)
            session.adopt(named.session_id, named.client_flags(), named.client_dynamic_flags())
            return session

        return SamplingClient(
            shared_leases.lease(settings, named.session_id, adopt),
            named.sampling_session_id,
            retry_config=retry_config,
            record_stability_info=named.record_stability_info,
            clone_id=None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.get_sampler_handle(), self._retry_config)

    @property
    def limiter(self) -> Limiter:
        """Paces this client's samples; `limiter.pause()` says whether and why they wait."""
        return self._lease.session.limiter

    @property
    def holder(self) -> SessionLease:
        """This client's lease of its session, for programs that need the layer below."""
        return self._lease

    def __repr__(self) -> str:
        return f"SamplingClient(sampling_session_id={self._sampling_session_id!r})"


class SamplingClientFuture(ClientFuture[SamplingClient], SamplingClient):
    """A `SamplingClient` that is being created.

    `await` it or call `result()` to get the client; using it as the client directly works too.
    """

    CLIENT_ATTRIBUTES = frozenset(
        {
            "_lease",
            "_queue_logger",
            "_record_stability_info",
            "_retry_config",
            "_sampler",
            "_sampling_session_id",
            "_tokenizer",
        }
    )

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingClient.__reduce__(self)


def _restored(handle: str, retry_config: RetryConfig | None) -> SamplingClient:
    """Unpickle a client, with a credential of this process."""
    try:
        return SamplingClient.from_sampler_handle(handle, retry_config=retry_config)
    except AuthenticationError as exc:
        raise AuthenticationError(
            "a pickled SamplingClient contains no credential, and this process has none",
            remedy="set TINKER_API_KEY here; or pass on get_sampler_handle() instead, and call "
            "SamplingClient.from_sampler_handle(handle, api_key=…)",
        ) from exc


def _check_options(
    target: TensorData | None, alt_tokens_k: int, last_n: int | None, with_logprobs: bool
) -> None:
    if target is not None and (
        target.dtype != "int64" or target.shape is None or len(target.shape) != 2
    ):
        raise ValidationError("target_prompt_logprobs must be an int64 matrix")
    if alt_tokens_k < 0:
        raise ValidationError(f"prompt_alt_tokens_k must not be negative: {alt_tokens_k}")
    if last_n is not None and (last_n < 1 or not with_logprobs):
        raise ValidationError(
            f"prompt_logprobs_last_n is {last_n}",
            remedy="it must be 1 or more, and prompt logprobs must be asked for",
        )


def _own(tensor: TensorData | None) -> TensorData | None:
    """The tensor's current values, however the caller's array changes before it is sent."""
    memory = b"" if tensor is None else tensor.numbers.memory
    if tensor is None or tensor.is_sparse or isinstance(memory, bytes) or memory.readonly:
        return tensor
    return TensorData.of_numbers(Numbers(bytes(memory), "int64"), "int64", tensor.shape)
