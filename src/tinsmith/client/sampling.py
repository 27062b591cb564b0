"""Sampling: prompts go out under the limiter's pace, sequences come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tinsmith.client.background import background
from tinsmith.client.budgets import Budget
from tinsmith.client.futures import APIFuture
from tinsmith.client.limits import Limiter
from tinsmith.client.poller import Poll, room_for
from tinsmith.client.queue_state import QueueState, QueueStateLogger, StateTeller
from tinsmith.client.sampler_handle import (
    NUMBERS_PER_CLONE,
    SamplerHandle,
    random_clone_id,
    shareable_headers,
)
from tinsmith.client.session import Session, SessionLease
from tinsmith.client.session_poller import SessionPoller
from tinsmith.client.settings import settings_from
from tinsmith.client.tokenizers import TokenizerOfModel
from tinsmith.errors import (
    APIResponseValidationError,
    APIStatusError,
    RateLimitError,
    ValidationError,
)
from tinsmith.types import requests as r
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.types.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionResponse,
    SampleResponse,
    SamplingParams,
)
from tinsmith.types.tensors import TensorData
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, to_http

GONE = 410
SMALL_PROMPT_BYTES = 131_072
SMALL_PAUSE_S, LARGE_PAUSE_S = 1.0, 5.0
"""How long a 429 that names no delay pauses samples: by the size of the prompt."""
MOST_RESUBMISSIONS = 3
MOST_SUBMISSIONS = 400
"""How many samples may be on their way to the service at once; waiting for results is free."""
_BYTES_PER_TOKEN = 10


class SamplingClient:
    """Samples from a base model or from saved weights. Any number of samples may be under way."""

    def __init__(
        self,
        lease: SessionLease,
        sampling_session_id: str,
        *,
        retry_config: Any = None,
        record_stability_info: bool = False,
        clone_id: int | None = 0,
    ) -> None:
        self._lease = lease
        self._clone_id = clone_id
        self._joining: asyncio.Task[int] | None = None
        self._tokenizer = TokenizerOfModel()
        self._poller: SessionPoller | None = None
        self._queue_logger = QueueStateLogger(sampling_session_id, "Sampling")
        self._state_teller = StateTeller(self)
        self._sampling_session_id = sampling_session_id
        self._retry_config = retry_config
        self._record_stability_info = record_stability_info
        flags = lease.session.flags
        self._slots = Budget(MOST_SUBMISSIONS)
        self._sending = Budget(flags.sample_dispatch_bytes_semaphore_size)
        self._room = Budget(flags.inflight_response_bytes_semaphore_size)

    @classmethod
    async def open(
        cls,
        lease: SessionLease,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Have the service make a sampler. For the background loop."""
        session = lease.session
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
    ) -> APIFuture[SampleResponse]:
        """Draw sequences that continue a prompt. Returns at once.

        Args:
            prompt: What to continue.
            num_samples: How many sequences to draw; they share the prompt's computation.
            sampling_params: How to draw.
            include_prompt_logprobs: Also give the log-probability of each prompt token.
            topk_prompt_logprobs: Also the k most likely tokens at each prompt position.
            topk_sample_logprobs: Also the k most likely tokens at each sampled position.
            target_prompt_logprobs: Also the log-probabilities of these tokens at each prompt
                position:
                an int64 matrix of len(prompt) - 1 rows, -1 where none is wanted.
            prompt_alt_tokens_k: Also k tokens drawn at each prompt position.
            prompt_logprobs_last_n: Only for the last n prompt positions.

        Raises:
            ValueError: An argument does not fit.
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
        return background().start(self._sample(request), f"sample of {self._sampling_session_id}")

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *args: Any,
        **kwargs: Any,
    ) -> SampleResponse:
        """As `sample`, for coroutines: gives the result itself."""
        return await self.sample(prompt, num_samples, sampling_params, *args, **kwargs)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
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
            logprobs = (await self._sample(request)).prompt_logprobs
            if logprobs is None:
                raise APIResponseValidationError(message="the service sent no prompt logprobs")
            return logprobs

        return background().start(work(), f"logprobs of {self._sampling_session_id}")

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """As `compute_logprobs`, for coroutines: gives the result itself."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def get_base_model(self) -> str:
        """The name of the base model; blocks for one call."""
        return background().run(self._get_base_model(), "get_sampler")

    async def get_base_model_async(self) -> str:
        """As `get_base_model`, without blocking."""
        return await background().start(self._get_base_model(), "get_sampler")

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; asks the service once which model it is, and loads it once.

        Raises:
            TokenizerError: It could not be found or loaded.
        """
        return background().run(self._tokenizer.get_async(self._get_base_model), "get_tokenizer")

    async def get_tokenizer_async(self) -> Any:
        """As `get_tokenizer`, without blocking."""
        return await background().start(
            self._tokenizer.get_async(self._get_base_model), "get_tokenizer"
        )

    async def _get_base_model(self) -> str:
        sampler: GetSamplerResponse = await self._lease.session.call(
            "get_sampler", r.GetSamplerRequest(sampler_id=self._sampling_session_id)
        )
        return sampler.base_model

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
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

    async def _sample(self, request: r.SampleRequest) -> SampleResponse:
        """Submit a sample and fetch its result; anew if the server lost it meanwhile."""
        for attempt in range(MOST_RESUBMISSIONS + 1):
            submitted, submit_s = await self._submit(request)
            try:
                response = await self._fetch(submitted, submit_s)
                return response.with_sequence_ids(submitted.sample_sequence_ids or [])
            except APIStatusError as error:
                if error.status_code != GONE or attempt == MOST_RESUBMISSIONS:
                    raise
        raise AssertionError("the loop above returns or raises")

    async def _submit(self, request: r.SampleRequest) -> tuple[UntypedAPIFuture, float]:
        """Send a sample when the limiter lets it, keeping its number over refusals."""
        session = self._lease.session
        clone_id = await self._joined()
        count = session.next_number(f"{self._sampling_session_id} {clone_id}")
        number = clone_id * NUMBERS_PER_CLONE + count
        endpoint = ENDPOINTS["asample"]
        numbered = request.model_copy(update={"seq_id": number})
        sent = to_http(endpoint, numbered)
        while True:
            await session.limiter.wait()
            began = time.monotonic()
            try:
                submitted = await self._send(session, sent)
            except RateLimitError as error:
                session.limiter.rate_limited(_pause_s(error, request.prompt), str(error))
            else:
                return submitted, time.monotonic() - began

    async def _send(self, session: Session, sent: HttpRequest) -> UntypedAPIFuture:
        # Slots and bytes are held while sending alone, not while waiting for leave or for a result.
        size = sum(map(len, sent.parts))
        async with self._slots.taken(), self._sending.taken(size):
            submitted: UntypedAPIFuture = await session.call_with(ENDPOINTS["asample"], sent)
        return submitted

    async def _joined(self) -> int:
        """Our clone's number: 0 for the original, else one that no other process has."""
        if self._clone_id is not None:
            return self._clone_id
        if self._joining is None:
            self._joining = asyncio.create_task(self._join())
        self._clone_id = await asyncio.shield(self._joining)
        return self._clone_id

    async def _join(self) -> int:
        session = self._lease.session
        await session.session_id()
        if not session.flags.sample_join_sampling_session:
            return random_clone_id()
        joined: JoinSamplingSessionResponse = await session.call(
            "join_sampling_session",
            r.JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id),
        )
        return joined.client_counter

    async def _fetch(self, submitted: UntypedAPIFuture, submit_s: float) -> SampleResponse:
        session, request_id = self._lease.session, submitted.request_id
        try:
            poller = self._session_poller()
            ended = None if poller is None else await poller.wait(request_id)
            size = getattr(ended, "response_payload_uncompressed_size", None)
            poll = Poll(
                session,
                request_id,
                "Sample",
                submit_s=submit_s,
                room=self._room,
                is_size_known=size is not None,
                observer=self._state_teller,
            )
            async with room_for(self._room if size else None, size or 0):
                response: SampleResponse = await poll.result()
        except asyncio.CancelledError:
            self._cancel_on_server(request_id)
            raise
        if poller is not None:
            poller.report_retrieved(request_id)
        return response

    def _session_poller(self) -> SessionPoller | None:
        session = self._lease.session
        if self._poller is None and session.flags.sample_use_retrieve_futures:
            self._poller = SessionPoller(session, self._sampling_session_id, self._clone_id or 0)
        return self._poller

    def _cancel_on_server(self, request_id: str) -> None:
        session = self._lease.session
        if session.dynamic_flags.sample_cancel_enabled:
            request = r.FutureCancelRequest(request_id=request_id)
            _ = background().start(session.call("cancel_future", request), "cancel_future")

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when a poll for a sample tells the state of the queue; logs that it is paused.

        Replace it to be told. It runs on the thread for callbacks.
        """
        self._queue_logger.on_queue_state_change(queue_state, queue_state_reason)

    # Other processes

    def get_sampler_handle(self) -> str:
        """This sampler's address as text, without a credential, for `from_sampler_handle`."""
        session = self._lease.session
        return SamplerHandle(
            base_url=session.settings.base_url,
            session_id=background().run(session.session_id(), "get_sampler_handle"),
            sampling_session_id=self._sampling_session_id,
            headers=shareable_headers(session.settings.default_headers),
            record_stability_info=self._record_stability_info,
            flags=session.flags.model_dump(),
            dynamic_flags=session.dynamic_flags.model_dump(),
        ).to_text()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client for the sampler that a handle names.

        Args:
            handle: What `get_sampler_handle` gave.
            api_key: The credential to use here; else that of this process's environment.
        """
        named = SamplerHandle.from_text(handle)
        settings = settings_from(
            base_url=named.base_url, api_key=api_key, default_headers=named.headers
        )
        session = Session(settings)
        session.adopt(named.session_id, named.client_flags(), named.client_dynamic_flags())
        return SamplingClient(
            SessionLease(session),
            named.sampling_session_id,
            record_stability_info=named.record_stability_info,
            clone_id=None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingClient.from_sampler_handle, (self.get_sampler_handle(),)

    @property
    def limiter(self) -> Limiter:
        """What paces this client's samples; `limiter.pause()` says whether and why they wait."""
        return self._lease.session.limiter

    @property
    def holder(self) -> SessionLease:
        """This client's hold on its session, for programs that reach below the surface."""
        return self._lease

    def __repr__(self) -> str:
        return f"SamplingClient(sampling_session_id={self._sampling_session_id!r})"


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


def _pause_s(error: RateLimitError, prompt: ModelInput) -> float:
    if error.retry_after_s is not None:
        return error.retry_after_s
    tokens = sum(chunk.length for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk))
    is_small = tokens * _BYTES_PER_TOKEN <= SMALL_PROMPT_BYTES
    return SMALL_PAUSE_S if is_small else LARGE_PAUSE_S
