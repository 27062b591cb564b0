"""Runs, checkpoints and sessions: looking them up, listing them, and taking care of them.

Every call has two faces: `name` returns a future at once, `name_async` gives the value to a
coroutine. The `iter_…` methods walk through a whole listing, a page at a time and only as far as
they are taken.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.session import Session, SessionLease
from tinsmith.client.settings import settings_from
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import (
    Checkpoint,
    CheckpointsListResponse,
    CheckpointType,
    Cursor,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)
from tinsmith.types.record import Record
from tinsmith.types.runs import (
    AccessScope,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)
from tinsmith.types.sampling import GetSamplerResponse

T = TypeVar("T")

PAGE_SIZE = 1000
"""The most that a listing is asked for at a time."""


class RestClient:
    """What the service keeps: runs, checkpoints, sessions."""

    def __init__(
        self,
        _lease: SessionLease | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _lease is not None and (base_url is not None or api_key is not None):
            raise ValidationError("a client of a service has that service's address and key")
        if _lease is None:
            _lease = SessionLease(Session(settings_from(base_url=base_url, api_key=api_key)))
        self._lease = _lease

    def _start(self, name: str, request: Record) -> APIFuture[Any]:
        return background().start(self._call(name, request), name)

    async def _call(self, name: str, request: Record) -> Any:
        session = self._lease.session
        await session.ready()
        return await session.call(name, request)

    # Training runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """One training run."""
        return self._start(
            "get_training_run",
            r.GetTrainingRunRequest(training_run_id=training_run_id, access_scope=access_scope),
        )

    async def get_training_run_async(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        """As `get_training_run`."""
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The training run that a checkpoint belongs to."""
        return self.get_training_run(_parsed(tinker_path).training_run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        """As `get_training_run_by_tinker_path`."""
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """A page of training runs, newest first; `iter_training_runs` gives them all."""
        return self._start(
            "list_training_runs",
            r.ListTrainingRunsRequest(
                limit=limit, offset=offset, access_scope=access_scope, project_id=project_id
            ),
        )

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> TrainingRunsResponse:
        """As `list_training_runs`."""
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def iter_training_runs(
        self,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Pages[TrainingRun]:
        """All training runs, fetched as they are taken; for `for` and for `async for`."""
        return Pages(
            lambda limit, offset: self.list_training_runs(limit, offset, access_scope, project_id),
            lambda page: (page.training_runs, page.cursor),
            page_size,
        )

    # Checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run."""
        return self._start(
            "list_checkpoints", r.ListCheckpointsRequest(training_run_id=training_run_id)
        )

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        """As `list_checkpoints`."""
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[CheckpointsListResponse]:
        """A page of the caller's checkpoints, newest first; `iter_checkpoints` gives them all."""
        return self._start(
            "list_user_checkpoints", r.ListUserCheckpointsRequest(limit=limit, offset=offset)
        )

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> CheckpointsListResponse:
        """As `list_user_checkpoints`."""
        return await self.list_user_checkpoints(limit, offset)

    def iter_checkpoints(self, page_size: int = PAGE_SIZE) -> Pages[Checkpoint]:
        """All of the caller's checkpoints, fetched as they are taken."""
        return Pages(
            self.list_user_checkpoints, lambda page: (page.checkpoints, page.cursor), page_size
        )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint; `checkpoint_id` as in listings, with its kind."""
        return self._start(
            "delete_checkpoint",
            r.CheckpointRequest(training_run_id=training_run_id, checkpoint_id=checkpoint_id),
        )

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        """As `delete_checkpoint`."""
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete the checkpoint at a path."""
        return self._start("delete_checkpoint", _named(tinker_path))

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `delete_checkpoint_from_tinker_path`."""
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def delete_checkpoints(
        self,
        training_run_id: str,
        *,
        checkpoint_type: CheckpointType | None = None,
        before: datetime.datetime | None = None,
        after: datetime.datetime | None = None,
    ) -> list[Checkpoint]:
        """Delete a run's checkpoints of one type and time; blocks, and says which are gone.

        Raises:
            ExceptionGroup: Some could not be deleted; the others are.
        """
        found = [
            checkpoint
            for checkpoint in self.list_checkpoints(training_run_id).result().checkpoints
            if checkpoint_type in (None, checkpoint.checkpoint_type)
            and (before is None or checkpoint.time < before)
            and (after is None or checkpoint.time > after)
        ]
        pending = [self.delete_checkpoint_from_tinker_path(found_.tinker_path) for found_ in found]
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} of {len(found)} are not deleted", errors)
        return found

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everybody read a checkpoint."""
        return self._start("publish_checkpoint", _named(tinker_path))

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `publish_checkpoint_from_tinker_path`."""
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let nobody else read a checkpoint any more."""
        return self._start("unpublish_checkpoint", _named(tinker_path))

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `unpublish_checkpoint_from_tinker_path`."""
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Say when a checkpoint expires; None means never."""
        named = _named(tinker_path)
        return self._start(
            "set_checkpoint_ttl",
            r.SetCheckpointTtlRequest(
                training_run_id=named.training_run_id,
                checkpoint_id=named.checkpoint_id,
                ttl_seconds=ttl_seconds,
            ),
        )

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        """As `set_checkpoint_ttl_from_tinker_path`."""
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Where the files of exported weights can be fetched from."""
        if _parsed(tinker_path).checkpoint_type != "external":
            raise ValidationError(
                f"{tinker_path} holds no external weights",
                remedy="save some with TrainingClient.save_weights_external",
            )
        return self._start("get_external_weights_urls", _named(tinker_path))

    async def get_external_weights_urls_async(
        self, tinker_path: str
    ) -> ExternalWeightsUrlsResponse:
        """As `get_external_weights_urls`."""
        return await self.get_external_weights_urls(tinker_path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint was trained from."""
        return self._start(
            "get_weights_info_by_tinker_path", r.WeightsInfoRequest(tinker_path=tinker_path)
        )

    # Sessions and samplers

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """What a session holds."""
        return self._start(
            "get_session", r.GetSessionRequest(session_id=session_id, access_scope=access_scope)
        )

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> GetSessionResponse:
        """As `get_session`."""
        return await self.get_session(session_id, access_scope)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """A page of session ids; `iter_sessions` gives them all."""
        return self._start(
            "list_sessions",
            r.ListSessionsRequest(limit=limit, offset=offset, access_scope=access_scope),
        )

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        """As `list_sessions`."""
        return await self.list_sessions(limit, offset, access_scope)

    def iter_sessions(
        self, access_scope: AccessScope = "owned", page_size: int = PAGE_SIZE
    ) -> Pages[str]:
        """All session ids, fetched as they are taken."""
        return Pages(
            lambda limit, offset: self.list_sessions(limit, offset, access_scope),
            lambda page: (page.sessions, None),
            page_size,
        )

    def search_sessions(self, request: r.SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """A page of sessions that match, newest first."""
        return self._start("search_sessions", request)

    async def search_sessions_async(self, request: r.SessionSearchRequest) -> SessionSearchResponse:
        """As `search_sessions`."""
        return await self.search_sessions(request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Put a session into a project."""
        return self._start(
            "assign_session_project",
            r.AssignSessionProjectRequest(session_id=session_id, project_id=project_id),
        )

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        """As `assign_session_project`."""
        await self.assign_session_project(session_id, project_id)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """What a sampler samples from."""
        return self._start("get_sampler", r.GetSamplerRequest(sampler_id=sampler_id))

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        """As `get_sampler`."""
        return await self.get_sampler(sampler_id)


class Pages(Iterator[T], AsyncIterator[T]):
    """A listing as one stream: for `for` in a thread, for `async for` in a coroutine.

    A page is fetched when its first item is wanted, so that what comes before a failing page is
    delivered first.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], APIFuture[Any]],
        read: Callable[[Any], tuple[list[T], Cursor | None]],
        page_size: int,
    ) -> None:
        if not 1 <= page_size <= PAGE_SIZE:
            raise ValidationError(f"page_size must lie in 1…{PAGE_SIZE}, not {page_size}")
        self._fetch = fetch
        self._read = read
        self._page_size = page_size
        self._offset = 0
        self._items: list[T] = []
        self._position = 0
        self._is_last = False

    def __iter__(self) -> Pages[T]:
        return self

    def __next__(self) -> T:
        if self._wants_page():
            self._take(self._fetch(self._page_size, self._offset).result())
        if self._position >= len(self._items):
            raise StopIteration
        return self._next_item()

    def __aiter__(self) -> Pages[T]:
        return self

    async def __anext__(self) -> T:
        if self._wants_page():
            self._take(await self._fetch(self._page_size, self._offset))
        if self._position >= len(self._items):
            raise StopAsyncIteration
        return self._next_item()

    def _wants_page(self) -> bool:
        return self._position >= len(self._items) and not self._is_last

    def _take(self, page: Any) -> None:
        self._items, cursor = self._read(page)
        self._position = 0
        self._offset += len(self._items)
        is_short = len(self._items) < self._page_size
        is_end = cursor is not None and self._offset >= cursor.total_count
        self._is_last = not self._items or is_end or (cursor is None and is_short)

    def _next_item(self) -> T:
        item = self._items[self._position]
        self._position += 1
        return item


def _parsed(tinker_path: str) -> ParsedCheckpointTinkerPath:
    return ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)


def _named(tinker_path: str) -> r.CheckpointRequest:
    parsed = _parsed(tinker_path)
    return r.CheckpointRequest(
        training_run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id
    )
