"""Samplers: made from base models, checkpoints or models in training, joined, and sampled from.

A sample's answer is made at once, by `draws.py`; its request id and sequence ids follow from the
sampler and the number that the client gave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.errors import BadRequestError, NotFoundError
from tinsmith.testing.account import Usage
from tinsmith.testing.arithmetic import Weights
from tinsmith.testing.checkpoint_store import CheckpointStore
from tinsmith.testing.commands import Commands, Result
from tinsmith.testing.draws import check_sample, sample
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.sessions import Sessions
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import CreateSamplingSessionRequest, SampleRequest
from tinsmith.types.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionResponse,
)
from tinsmith.types.usage import SamplingPrefillBillingEvent, SamplingSampleBillingEvent

CLONE_NUMBERS = 10**9
"""A clone's samples are numbered from its own number times this."""


class Sampler(msgspec.Struct, kw_only=True, eq=False):
    """Weights that can be sampled from."""

    sampler_id: str
    session_id: str
    weights: Weights
    model_path: str | None = None
    asked: CreateSamplingSessionRequest | None = None
    clones: int = 0
    joined: dict[str, int] = {}


class Samplers:
    """All samplers of the service."""

    def __init__(
        self,
        settings: ServiceSettings,
        sessions: Sessions,
        commands: Commands,
        store: CheckpointStore,
        usage: Usage,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._commands = commands
        self._store = store
        self._usage = usage
        self._samplers: dict[str, Sampler] = {}

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "create_sampling_session": self.create,
            "join_sampling_session": self.join,
            "get_sampler": self.show,
            "asample": self.sample,
        }

    def make(
        self, session_id: str, number: int, weights: Weights, model_path: str | None = None
    ) -> Sampler:
        """A sampler under the number that its client gave it."""
        session = self._sessions.usable(session_id)
        sampler = Sampler(
            sampler_id=f"{session_id}:sample:{number}",
            session_id=session_id,
            weights=weights,
            model_path=model_path,
        )
        if sampler.sampler_id in self._samplers:
            raise BadRequestError(f"{sampler.sampler_id} is taken; numbers are used once")
        self._samplers[sampler.sampler_id] = sampler
        session.sampler_ids.append(sampler.sampler_id)
        return sampler

    def create(self, received: ReceivedRequest) -> CreateSamplingSessionResponse:
        """Make a sampler of a base model or a checkpoint; the same one if asked again."""
        request: CreateSamplingSessionRequest = received.request
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        known = self._samplers.get(sampler_id)
        if known is None or known.asked != request:
            weights = self._weights(request.base_model, request.model_path)
            number = request.sampling_session_seq_id
            known = self.make(request.session_id, number, weights, request.model_path)
            known.asked = request
        return CreateSamplingSessionResponse(sampling_session_id=known.sampler_id)

    def join(self, received: ReceivedRequest) -> JoinSamplingSessionResponse:
        """Give a clone its number; once for each idempotency key."""
        sampler = self._sampler(received.request.sampling_session_id)
        key = received.headers.get("x-idempotency-key", "")
        if key not in sampler.joined or not key:
            sampler.clones += 1
            sampler.joined[key] = sampler.clones
        return JoinSamplingSessionResponse(client_counter=sampler.joined[key])

    def show(self, received: ReceivedRequest) -> GetSamplerResponse:
        """What a sampler samples from."""
        sampler = self._sampler(received.request.sampler_id)
        return GetSamplerResponse(
            sampler_id=sampler.sampler_id,
            base_model=sampler.weights.base_model,
            model_path=sampler.model_path,
        )

    def sample(self, received: ReceivedRequest) -> UntypedAPIFuture:
        """Accept a sample."""
        request: SampleRequest = received.request
        known = self._commands.find(received)
        if known is not None:
            return known.answer()
        check_sample(request)
        if request.sampling_session_id is None:
            weights, session_id = self._weights(request.base_model, request.model_path), ""
            request_id = f"sample-{received.number}"
        else:
            sampler = self._sampler(request.sampling_session_id)
            self._sessions.usable(sampler.session_id)
            weights, session_id = sampler.weights, sampler.session_id
            number = (
                request.seq_id if request.seq_id is not None else f"unnumbered-{received.number}"
            )
            request_id = f"{sampler.sampler_id}:{number}"
        clone = (request.seq_id or 0) // CLONE_NUMBERS
        command = self._commands.open(
            received,
            request_id=request_id,
            sequence_ids=[f"{request_id}:{index}" for index in range(request.num_samples)],
            feed=self._commands.feed(request.sampling_session_id or "", clone),
        )
        self._commands.run_soon(
            command, lambda: self._draw(weights, session_id, request, request_id)
        )
        return command.answer()

    def check_known(self, sampling_session_id: str) -> None:
        """Raise `NotFoundError` for a sampler that is not there."""
        self._sampler(sampling_session_id)

    def _draw(
        self, weights: Weights, session_id: str, request: SampleRequest, request_id: str
    ) -> Result:
        response = sample(weights, request, self._settings, seed=request_id)
        if session_id:
            read = SamplingPrefillBillingEvent(cached=False, token_count=request.prompt.length)
            drawn = sum(len(sequence.token_numbers) for sequence in response.sequences)
            self._usage.add(session_id, weights.base_model, read)
            written = SamplingSampleBillingEvent(token_count=drawn)
            self._usage.add(session_id, weights.base_model, written)
        return response

    def _weights(self, base_model: str | None, model_path: str | None) -> Weights:
        if model_path is not None:
            return self._store.at_path(model_path).weights
        if base_model is None:
            raise BadRequestError("a sampler needs a base_model or a model_path")
        return Weights(base_model, self._settings.vocabulary_size)

    def _sampler(self, sampler_id: str) -> Sampler:
        if sampler_id not in self._samplers:
            raise NotFoundError(f"there is no sampler {sampler_id!r}")
        return self._samplers[sampler_id]
