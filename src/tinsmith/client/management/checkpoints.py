"""Checkpoints: listed, deleted, published, kept, copied and fetched."""

from __future__ import annotations

import datetime
from typing import Any

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.archives import archive_url
from tinsmith.client.management.base import ManagementClient
from tinsmith.client.management.bulk_delete import CheckpointFilter, DeletionReport, delete_all
from tinsmith.client.management.pages import PAGE_SIZE, Pages
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CheckpointType,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)
from tinsmith.types.runs import WeightsInfoResponse


class CheckpointCalls(ManagementClient):
    """The part of `RestClient` that is about checkpoints."""

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
        """A page of the caller's checkpoints, newest first; `iter_checkpoints` gives them all."""
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
        """All of the caller's checkpoints, fetched as they are taken.

        Args:
            page_size: How many to fetch at a time, at most 1,000.
            timeout: Seconds after which the fetching of a page is given up.
        """
        return Pages(
            lambda limit, offset: self.list_user_checkpoints(limit, offset, timeout=timeout),
            lambda page: (page.checkpoints, page.cursor),
            page_size,
        )

    # Deleting

    def delete_checkpoint(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Delete a checkpoint; `checkpoint_id` as in listings, with its kind."""
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
        """Delete the checkpoint at a path."""
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
        """Delete all checkpoints of a run, of a type, or of a time, and say how each went.

        A checkpoint that cannot be deleted does not keep the others, and is told with its error.
        A time without an offset is taken as UTC.

        Args:
            training_run_id: Of this run alone; of all of the caller's runs if None.
            checkpoint_type: Of this type alone.
            before: Saved before this time.
            after: Saved after this time.
            dry_run: Find them, and delete nothing.
            timeout: Seconds after which the call is given up. What is deleted stays so.

        Raises:
            ValueError: Nothing was said of which, and so everything would go.
        """
        if all(given is None for given in (training_run_id, checkpoint_type, before, after)):
            raise ValidationError(
                "this would delete every checkpoint",
                remedy="name a run, a type or a time; after=datetime.min takes them all",
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
        # The whole listing first: a page's offset would shift under deletions.
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

    # Who may see it, and for how long

    def publish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Let everybody read a checkpoint."""
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
        """Let nobody else read a checkpoint any more."""
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
        """Say when a checkpoint expires, from now; None means never."""
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

    # What it holds

    def get_weights_info_by_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint was trained from; also of published ones of others."""
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
        """Where the files of exported weights can be fetched from.

        Raises:
            ValueError: The path is not one of exported weights.
        """
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValidationError(
                f"{tinker_path} holds no external weights",
                remedy="save some with TrainingClient.save_weights_external",
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
        """Where a checkpoint can be fetched from as one archive, and until when.

        For programs written for releases up to 0.35, and services that still have it; others say
        `NotFoundError`, and `get_external_weights_urls` takes its place.
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
        """As `get_checkpoint_archive_url`, for the checkpoint at a path."""
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
        """Copy a checkpoint into a project; gives the path of the copy.

        The copy keeps its kind and lives in a run of its own, which cannot be trained. However
        often the call is tried again, one copy is made.

        Args:
            path: What to copy.
            destination_project_id: Where to; else the `TINKER_PROJECT_ID` that was set when this
                client was made.
            ttl_seconds: When the copy expires; None means never.
            weights_access_token: A credential of another account, which may read the checkpoint.
            timeout: Seconds after which the call is given up.

        Raises:
            ValueError: There is no project to copy to.
        """
        project_id = destination_project_id or self._lease.session.settings.project_id
        if project_id is None:
            raise ValidationError(
                "there is no project to copy to",
                remedy="give destination_project_id, or set TINKER_PROJECT_ID",
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
