"""Saving and loading the weights of a model in training; `RestClient` manages the checkpoints."""

from __future__ import annotations

import warnings

from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.submission import Submitter, present
from tinsmith.types import requests as r
from tinsmith.types.training import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


class SavingCalls:
    """The part of `TrainingClient` that saves and loads."""

    def __init__(self, lease: SessionLease, model_id: str) -> None:
        self._lease = lease
        self._submitter = Submitter(lease.session, model_id)
        self.model_id = model_id

    @property
    def holder(self) -> SessionLease:
        """This client's lease of its session, for programs that need the layer below."""
        return self._lease

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state, to resume training from.

        Args:
            name: The name of the checkpoint within this run.
            ttl_seconds: Seconds after which it expires; None for never.
            overwrite: Replace a checkpoint of that name.
            user_metadata: Stored with it.
            timeout: As in `forward`.
        """
        return self._submitter.start_call(
            "save_weights",
            "SaveWeights",
            lambda number: r.SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                seq_id=number,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
            timeout=timeout,
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """As `save_state`."""
        return self.save_state(name, ttl_seconds, overwrite, user_metadata, timeout=timeout)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights to sample from; arguments as in `save_state`."""
        return self._submitter.start_call(
            "save_weights_for_sampler",
            "SaveWeightsForSampler",
            lambda number: r.SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                seq_id=number,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            ),
            lambda saved: SaveWeightsForSamplerResponse(path=present(saved.path, "path")),
            timeout=timeout,
        )

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """As `save_weights_for_sampler`."""
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata, timeout=timeout)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        user_metadata: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Save weights for other programs, encrypted if there are recipients."""
        return self._submitter.start_call(
            "save_weights_external",
            "SaveWeightsExternal",
            lambda number: r.SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                seq_id=number,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
                user_metadata=user_metadata,
            ),
            lambda saved: SaveWeightsExternalResponse(path=present(saved.path, "path")),
            timeout=timeout,
        )

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        user_metadata: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """As `save_weights_external`."""
        return self.save_weights_external(
            name,
            ttl_seconds,
            age_encryption_recipients,
            user_metadata=user_metadata,
            timeout=timeout,
        )

    def load_state(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights into this model.

        Deprecated: create a client with `ServiceClient.create_training_client_from_state` instead.
        """
        return self._load(path, weights_access_token, with_optimizer=False, timeout=timeout)

    async def load_state_async(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """As `load_state`."""
        return self.load_state(path, weights_access_token, timeout=timeout)

    def load_state_with_optimizer(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights and optimizer state; deprecated as `load_state` is."""
        return self._load(path, weights_access_token, with_optimizer=True, timeout=timeout)

    async def load_state_with_optimizer_async(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """As `load_state_with_optimizer`."""
        return self.load_state_with_optimizer(path, weights_access_token, timeout=timeout)

    def _load(
        self, path: str, token: str | None, *, with_optimizer: bool, timeout: float | None
    ) -> APIFuture[LoadWeightsResponse]:
        warnings.warn(
            "load_state is deprecated; use ServiceClient.create_training_client_from_state",
            FutureWarning,
            stacklevel=3,
        )
        return self.load_weights(path, token, with_optimizer=with_optimizer, timeout=timeout)

    def load_weights(
        self,
        path: str,
        token: str | None = None,
        *,
        with_optimizer: bool,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint, as `create_training_client_from_state` does."""
        return self._submitter.start_call(
            "load_weights",
            "LoadWeights",
            lambda number: r.LoadWeightsRequest(
                model_id=self.model_id,
                seq_id=number,
                path=path,
                optimizer=with_optimizer,
                weights_access_token=token,
            ),
            timeout=timeout,
        )
