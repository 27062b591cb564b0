"""List, search, upload, delete, publish, expire, copy and download checkpoints.

Many are deleted a few at a time, with a report of the outcome of each.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import (
    PAGE_SIZE,
    ManagementClient,
    Pages,
    warn_experimental,
)
from tinsmith.client.management.redirects import archive_url
from tinsmith.errors import NotFoundError, TinkerError, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointSearchResponse,
    CheckpointsListResponse,
    CheckpointType,
    CopyWeightsResponse,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)
from tinsmith.types.runs import WeightsInfoResponse
from tinsmith.types.training import LoraConfig

AT_ONCE = 16


class FailedDeletion(msgspec.Struct, frozen=True):
    """A checkpoint that could not be deleted, and the error."""

    checkpoint: Checkpoint
    error: TinkerError


class DeletionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `RestClient.delete_checkpoints`."""

    deleted: list[Checkpoint]
    """The deleted checkpoints; in a dry run, those that would be deleted."""
    failed: list[FailedDeletion]
    is_dry_run: bool = False


class CheckpointFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects checkpoints. A time without an offset is taken as UTC."""

    checkpoint_type: CheckpointType | None = None
    before: datetime.datetime | None = None
    after: datetime.datetime | None = None

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has the type and was saved between the two times."""
        saved_at = _in_utc(checkpoint.time)
        return (
            self.checkpoint_type in (None, checkpoint.checkpoint_type)
            and (self.before is None or saved_at < _in_utc(self.before))
            and (self.after is None or saved_at > _in_utc(self.after))
        )


def _in_utc(time: datetime.datetime) -> datetime.datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


async def delete_all(
    checkpoints: Iterable[Checkpoint], delete: Callable[[Checkpoint], Awaitable[object]]
) -> DeletionReport:
    """Delete checkpoints, a few at a time; a failure does not stop the others."""
    found = list(checkpoints)
    waiting = iter(found)
    errors: dict[str, TinkerError] = {}

    async def work() -> None:
        for checkpoint in waiting:
            try:
                await delete(checkpoint)
            except NotFoundError:
                continue  # deleted, perhaps by an attempt whose reply was lost
            except TinkerError as error:
                errors[checkpoint.tinker_path] = error

    await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(found)))))
    return DeletionReport(
        deleted=[one for one in found if one.tinker_path not in errors],
        failed=[
            FailedDeletion(one, errors[one.tinker_path])
            for one in found
            if one.tinker_path in errors
        ],
    )


class CheckpointCalls(ManagementClient):
    """The methods of `RestClient` for checkpoints."""

    def list_checkpoints(
        self, training_run_id: str, *, timeout: float | None = None
    ) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run."""
        request = r.ListCheckpointsRequest(training_run_id=training_run_id)
        return self._start("list_checkpoints", request, timeout)

    async def list_checkpoints_async(
        self, training_run_id: str, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        """As `list_checkpoints`."""
        return await self.list_checkpoints(training_run_id, timeout=timeout)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0, *, timeout: float | None = None
    ) -> APIFuture[CheckpointsListResponse]:
        """A page of the caller's checkpoints, newest first; `iter_checkpoints` lists them all."""
        request = r.ListUserCheckpointsRequest(limit=limit, offset=offset)
        return self._start("list_user_checkpoints", request, timeout)

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        """As `list_user_checkpoints`."""
        return await self.list_user_checkpoints(limit, offset, timeout=timeout)

    def iter_checkpoints(
        self, page_size: int = PAGE_SIZE, *, timeout: float | None = None
    ) -> Pages[Checkpoint]:
        """Iterate over all of the caller's checkpoints; pages are fetched as needed.

        Args:
            page_size: Checkpoints per request, at most 1,000.
            timeout: Seconds to wait for each page.
        """
        return Pages(
            lambda limit, offset: self.list_user_checkpoints(limit, offset, timeout=timeout),
            lambda page: (page.checkpoints, page.cursor),
            page_size,
        )

    def search_checkpoints(
        self, request: r.CheckpointSearchRequest, *, timeout: float | None = None
    ) -> APIFuture[CheckpointSearchResponse]:
        """A page of matching checkpoints, newest first. Experimental: it may change.

        For the next page, pass this page's `next_cursor` as the request's `cursor`.
        """
        warn_experimental("search_checkpoints")
        return self._start("search_checkpoints", request, timeout)

    async def search_checkpoints_async(
        self, request: r.CheckpointSearchRequest, *, timeout: float | None = None
    ) -> CheckpointSearchResponse:
        """As `search_checkpoints`."""
        warn_experimental("search_checkpoints")
        found: CheckpointSearchResponse = await self._start("search_checkpoints", request, timeout)
        return found

    # Uploading

    def external_weights_upload_start(
        self,
        base_model: str,
        lora_config: LoraConfig,
        destination_project_id: str | None = None,
        *,
        user_metadata: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> APIFuture[ExternalWeightsUploadStartResponse]:
        """Start the upload of an adapter that was trained elsewhere. Experimental: it may change.

        Send each file with an HTTP `PUT` to its URL, then call `external_weights_upload_finish`. A
        `PUT` that failed can be repeated until the URLs expire.

        Args:
            base_model: The service's name of the base model.
            lora_config: The rank, and which layers the adapter has.
            destination_project_id: The project of the checkpoint.
            user_metadata: Stored with the checkpoint; only tinsmith services take it.
            timeout: Seconds to wait for the call.
        """
        warn_experimental("external_weights_upload_start")
        return self._start_upload(
            base_model, lora_config, destination_project_id, user_metadata, timeout
        )

    async def external_weights_upload_start_async(
        self,
        base_model: str,
        lora_config: LoraConfig,
        destination_project_id: str | None = None,
        *,
        user_metadata: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExternalWeightsUploadStartResponse:
        """As `external_weights_upload_start`."""
        warn_experimental("external_weights_upload_start")
        return await self._start_upload(
            base_model, lora_config, destination_project_id, user_metadata, timeout
        )

    def _start_upload(
        self,
        base_model: str,
        lora_config: LoraConfig,
        project_id: str | None,
        user_metadata: dict[str, str] | None,
        timeout: float | None,
    ) -> APIFuture[ExternalWeightsUploadStartResponse]:
        request = r.ExternalWeightsUploadStartRequest(
            base_model=base_model,
            lora_config=lora_config,
            destination_project_id=project_id,
            user_metadata=user_metadata,
        )
        return self._start("external_weights_upload_start", request, timeout)

    def external_weights_upload_finish(
        self, upload_id: str, *, timeout: float | None = None
    ) -> APIFuture[ExternalWeightsUploadFinishResponse]:
        """Make a checkpoint of the uploaded files. Experimental: it may change.

        The service checks them first. Repeated, it returns the same checkpoint.
        """
        warn_experimental("external_weights_upload_finish")
        request = r.ExternalWeightsUploadFinishRequest(upload_id=upload_id)
        return self._start("external_weights_upload_finish", request, timeout)

    async def external_weights_upload_finish_async(
        self, upload_id: str, *, timeout: float | None = None
    ) -> ExternalWeightsUploadFinishResponse:
        """As `external_weights_upload_finish`."""
        warn_experimental("external_weights_upload_finish")
        request = r.ExternalWeightsUploadFinishRequest(upload_id=upload_id)
        done: ExternalWeightsUploadFinishResponse = await self._start(
            "external_weights_upload_finish", request, timeout
        )
        return done

    # Deleting

    def delete_checkpoint(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Delete a checkpoint; `checkpoint_id` is as in listings, including its kind."""
        request = r.CheckpointRequest(training_run_id=training_run_id, checkpoint_id=checkpoint_id)
        return self._start("delete_checkpoint", request, timeout)

    async def delete_checkpoint_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> None:
        """As `delete_checkpoint`."""
        await self.delete_checkpoint(training_run_id, checkpoint_id, timeout=timeout)

    def delete_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Delete the checkpoint with this path."""
        return self._start_named(
            "delete_checkpoint", tinker_path, timeout, "delete_checkpoint_from_tinker_path"
        )

    async def delete_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """As `delete_checkpoint_from_tinker_path`."""
        await self.delete_checkpoint_from_tinker_path(tinker_path, timeout=timeout)

    def delete_checkpoints(
        self,
        training_run_id: str | None = None,
        checkpoint_type: CheckpointType | None = None,
        before: datetime.datetime | None = None,
        after: datetime.datetime | None = None,
        dry_run: bool = False,
        *,
        timeout: float | None = None,
    ) -> APIFuture[DeletionReport]:
        """Delete the checkpoints that match all given filters, and report the outcome of each.

        A checkpoint that cannot be deleted does not stop the others; the report has its error.
        A time without an offset is taken as UTC.

        Args:
            training_run_id: Only those of this run; None means all of the caller's runs.
            checkpoint_type: Only those of this type.
            before: Only those saved before this time.
            after: Only those saved after this time.
            dry_run: Report the matching checkpoints without deleting them.
            timeout: Seconds to wait for the whole call. Deletions made by then stay.

        Raises:
            ValueError: No filter was given, which would delete everything.
        """
        if all(given is None for given in (training_run_id, checkpoint_type, before, after)):
            raise ValidationError(
                "this would delete every checkpoint",
                remedy="select them by run, type or time; after=datetime.min selects all",
            )
        which = CheckpointFilter(checkpoint_type=checkpoint_type, before=before, after=after)
        work = self._delete_all(training_run_id, which, dry_run)
        return background().start(work, "delete_checkpoints", timeout)

    async def delete_checkpoints_async(
        self,
        training_run_id: str | None = None,
        checkpoint_type: CheckpointType | None = None,
        before: datetime.datetime | None = None,
        after: datetime.datetime | None = None,
        dry_run: bool = False,
        *,
        timeout: float | None = None,
    ) -> DeletionReport:
        """As `delete_checkpoints`."""
        return await self.delete_checkpoints(
            training_run_id, checkpoint_type, before, after, dry_run, timeout=timeout
        )

    async def _delete_all(
        self, training_run_id: str | None, which: CheckpointFilter, dry_run: bool
    ) -> DeletionReport:
        # List everything first: deletions would shift the offsets of later pages.
        if training_run_id is None:
            listed = [checkpoint async for checkpoint in self.iter_checkpoints()]
        else:
            listed = (await self.list_checkpoints(training_run_id)).checkpoints
        found = [checkpoint for checkpoint in listed if which.fits(checkpoint)]
        if dry_run:
            return DeletionReport(deleted=found, failed=[], is_dry_run=True)
        return await delete_all(
            found, lambda one: self._call("delete_checkpoint", _named(one.tinker_path))
        )

    # Access and expiry

    def publish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Make a checkpoint readable by everyone."""
        return self._start_named(
            "publish_checkpoint", tinker_path, timeout, "publish_checkpoint_from_tinker_path"
        )

    async def publish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """As `publish_checkpoint_from_tinker_path`."""
        await self.publish_checkpoint_from_tinker_path(tinker_path, timeout=timeout)

    def unpublish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Make a published checkpoint private again."""
        return self._start_named(
            "unpublish_checkpoint", tinker_path, timeout, "unpublish_checkpoint_from_tinker_path"
        )

    async def unpublish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """As `unpublish_checkpoint_from_tinker_path`."""
        await self.unpublish_checkpoint_from_tinker_path(tinker_path, timeout=timeout)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Set the time until a checkpoint expires, in seconds from now; None means never."""
        named = _named(tinker_path)
        request = r.SetCheckpointTtlRequest(
            training_run_id=named.training_run_id,
            checkpoint_id=named.checkpoint_id,
            ttl_seconds=ttl_seconds,
        )
        return self._start(
            "set_checkpoint_ttl", request, timeout, method="set_checkpoint_ttl_from_tinker_path"
        )

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None, *, timeout: float | None = None
    ) -> None:
        """As `set_checkpoint_ttl_from_tinker_path`."""
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds, timeout=timeout)

    # Contents

    def get_weights_info_by_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[WeightsInfoResponse]:
        """The base model and LoRA settings of a checkpoint, one's own or a published one."""
        request = r.WeightsInfoRequest(tinker_path=tinker_path)
        return self._start("get_weights_info_by_tinker_path", request, timeout)

    async def get_weights_info_by_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> WeightsInfoResponse:
        """As `get_weights_info_by_tinker_path`."""
        return await self.get_weights_info_by_tinker_path(tinker_path, timeout=timeout)

    def get_external_weights_urls(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[ExternalWeightsUrlsResponse]:
        """The download URLs of the files of exported weights.

        Raises:
            ValueError: The path is not that of exported weights.
        """
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValidationError(
                f"{tinker_path} is not a path of external weights",
                remedy="save them with TrainingClient.save_weights_external",
            )
        return self._start_named(
            "get_external_weights_urls", tinker_path, timeout, "get_external_weights_urls"
        )

    async def get_external_weights_urls_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> ExternalWeightsUrlsResponse:
        """As `get_external_weights_urls`."""
        return await self.get_external_weights_urls(tinker_path, timeout=timeout)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The download URL of a checkpoint as one archive, and when the URL expires.

        For programs written for releases of the API up to 0.35. Services without this endpoint
        answer `NotFoundError`; use `get_external_weights_urls` there.
        """
        request = r.CheckpointRequest(training_run_id=training_run_id, checkpoint_id=checkpoint_id)
        return self._start_archive(request, timeout)

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        """As `get_checkpoint_archive_url`."""
        return await self.get_checkpoint_archive_url(
            training_run_id, checkpoint_id, timeout=timeout
        )

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """As `get_checkpoint_archive_url`, for the checkpoint with this path."""
        return self._start_archive(_named(tinker_path), timeout)

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        """As `get_checkpoint_archive_url_from_tinker_path`."""
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path, timeout=timeout)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project; returns the path of the copy.

        The copy has the same kind and belongs to a new run, which cannot be trained. Retries do not
        create further copies.

        Args:
            path: The checkpoint to copy.
            destination_project_id: The project to copy to; by default the `TINKER_PROJECT_ID` that
                was set when this client was created.
            ttl_seconds: Seconds until the copy expires; None means never.
            weights_access_token: A credential of another account that may read the checkpoint.
            timeout: Seconds to wait for the call.

        Raises:
            ValueError: No project was given and none is set.
        """
        project_id = destination_project_id or self._lease.session.settings.project_id
        if project_id is None:
            raise ValidationError(
                "no project to copy to",
                remedy="pass destination_project_id, or set TINKER_PROJECT_ID",
            )
        request = r.CopyWeightsRequest(
            source_path=path,
            destination_project_id=project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

        async def work() -> str:
            copied: CopyWeightsResponse = await self._call("copy_weights", request)
            return copied.tinker_path

        return background().start(work(), "copy_weights", timeout)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """As `copy_weights`."""
        return await self.copy_weights(
            path,
            destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
            timeout=timeout,
        )

    def _start_archive(
        self, request: r.CheckpointRequest, timeout: float | None
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        async def work() -> CheckpointArchiveUrlResponse:
            return await archive_url(await self._ready(), request)

        return background().start(work(), "get_checkpoint_archive_url", timeout)

    def _start_named(
        self, name: str, tinker_path: str, timeout: float | None, method: str
    ) -> APIFuture[Any]:
        return self._start(name, _named(tinker_path), timeout, method=method)


def _named(tinker_path: str) -> r.CheckpointRequest:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return r.CheckpointRequest(
        training_run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id
    )
