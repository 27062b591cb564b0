"""The endpoints of training runs and checkpoints: listed, published, copied, exported, deleted.

What they show and change is kept in `checkpoint_store.py`; files go to `downloads.py`.
"""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Callable
from typing import Any, TypeVar

from tinsmith.errors import BadRequestError, ValidationError
from tinsmith.testing.account import Audit, metadata_as_text, now
from tinsmith.testing.checkpoint_store import CheckpointStore, Run, Saved, expiry
from tinsmith.testing.downloads import Downloads, archive
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
)
from tinsmith.types.requests import (
    CheckpointRequest,
    CopyWeightsRequest,
    ListTrainingRunsRequest,
    ListUserCheckpointsRequest,
    SetCheckpointTtlRequest,
)
from tinsmith.types.runs import TrainingRun, TrainingRunsResponse, WeightsInfoResponse
from tinsmith.types.usage import (
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
)
from tinsmith.wire.exchange import HttpReply

_URL_LIFETIME = datetime.timedelta(minutes=15)
_GIGABYTE = 10**9
ItemT = TypeVar("ItemT")


class Checkpoints:
    """Answers for one store."""

    def __init__(
        self,
        settings: ServiceSettings,
        store: CheckpointStore,
        audit: Audit,
        downloads: Downloads,
    ) -> None:
        self._settings = settings
        self._store = store
        self._audit = audit
        self._downloads = downloads
        self._copies: dict[str, CopyWeightsResponse] = {}
        self._deleted: set[tuple[str, str]] = set()

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "list_training_runs": self.list_runs,
            "get_training_run": self.show_run,
            "list_checkpoints": self.list_of_run,
            "list_model_checkpoints": self.list_of_run,
            "list_user_checkpoints": self.list_of_user,
            "get_external_weights_urls": self.external_urls,
            "get_checkpoint_archive_url": self.archive_url,
            "publish_checkpoint": lambda received: self._set_public(received, True),
            "unpublish_checkpoint": lambda received: self._set_public(received, False),
            "set_checkpoint_ttl": self.set_ttl,
            "delete_checkpoint": self.delete,
            "copy_weights": self.copy,
            "get_weights_info_by_tinker_path": self.weights_info,
            "get_current_checkpoint_storage_usage": self.storage_usage,
        }

    def list_runs(self, received: ReceivedRequest) -> TrainingRunsResponse:
        """A page of runs, newest first."""
        request: ListTrainingRunsRequest = received.request
        runs = [
            run
            for run in reversed(self._store.runs())
            if request.project_id in (None, run.project_id)
        ]
        page, cursor = _page(runs, request.offset, request.limit)
        return TrainingRunsResponse(training_runs=[_shown(run) for run in page], cursor=cursor)

    def show_run(self, received: ReceivedRequest) -> TrainingRun:
        """One run."""
        return _shown(self._store.run(received.request.training_run_id))

    def list_of_run(self, received: ReceivedRequest) -> CheckpointsListResponse:
        """All checkpoints of a run, newest first."""
        saved = reversed(self._store.run(received.request.training_run_id).living().values())
        return CheckpointsListResponse(checkpoints=[one.checkpoint for one in saved])

    def list_of_user(self, received: ReceivedRequest) -> CheckpointsListResponse:
        """A page of all checkpoints, newest first."""
        request: ListUserCheckpointsRequest = received.request
        runs = self._store.runs()
        saved = [one.checkpoint for run in runs for one in run.living().values()]
        saved.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        page, cursor = _page(saved, request.offset, request.limit)
        return CheckpointsListResponse(checkpoints=page, cursor=cursor)

    def weights_info(self, received: ReceivedRequest) -> WeightsInfoResponse:
        """What a checkpoint was trained from."""
        run = self._store.at_path(received.request.tinker_path).run
        return WeightsInfoResponse(
            base_model=run.base_model,
            optimizer_config=run.optimizer,
            is_lora=True,
            lora_rank=run.lora.rank,
            train_unembed=run.lora.train_unembed,
            train_mlp=run.lora.train_mlp,
            train_attn=run.lora.train_attn,
        )

    def external_urls(self, received: ReceivedRequest) -> ExternalWeightsUrlsResponse:
        """Where an exported checkpoint's files are."""
        saved = self._named(received)
        if saved.checkpoint.checkpoint_type != "external":
            raise BadRequestError(f"{saved.checkpoint.tinker_path} was not saved for export")
        suffix = ".age" if saved.is_encrypted else ""
        urls = {
            name + suffix: self._downloads.put(f"{_folder(saved)}/{name}{suffix}", content)
            for name, content in saved.run.files().items()
        }
        return ExternalWeightsUrlsResponse(urls=urls, expires=now() + _URL_LIFETIME)

    def archive_url(self, received: ReceivedRequest) -> CheckpointArchiveUrlResponse | HttpReply:
        """Where a checkpoint's archive is."""
        saved = self._named(received)
        url = self._downloads.put(f"{_folder(saved)}.tar", archive(saved.run.files()))
        if self._settings.archive_redirects:
            expires = email.utils.format_datetime(now() + _URL_LIFETIME, usegmt=True)
            return HttpReply(302, {"Location": url, "Expires": expires}, [])
        return CheckpointArchiveUrlResponse(url=url, expires=now() + _URL_LIFETIME)

    def set_ttl(self, received: ReceivedRequest) -> None:
        """Set or remove the time at which a checkpoint expires."""
        request: SetCheckpointTtlRequest = received.request
        saved = self._named(received)
        if not isinstance(request.ttl_seconds, int | None):
            raise BadRequestError("the body must name ttl_seconds; null means never")
        try:
            saved.change(expires_at=expiry(request.ttl_seconds))
        except ValidationError as exc:
            raise BadRequestError(str(exc)) from exc

    def delete(self, received: ReceivedRequest) -> None:
        """Delete a checkpoint; asked again under the same idempotency key, it is done already."""
        key = received.headers.get("x-idempotency-key", "")
        if (key, received.path) in self._deleted:
            return
        saved = self._named(received)
        if key:
            self._deleted.add((key, received.path))
        del saved.run.checkpoints[saved.checkpoint.checkpoint_id]
        self._audit.add("checkpoint.deleted", {}, tinker_path=saved.checkpoint.tinker_path)

    def copy(self, received: ReceivedRequest) -> CopyWeightsResponse:
        """Copy a checkpoint into a run of its own; once for each idempotency key."""
        request: CopyWeightsRequest = received.request
        key = received.headers.get("x-idempotency-key", "")
        if key in self._copies:
            return self._copies[key]
        source = self._store.at_path(request.source_path)
        run = Run(
            run_id=f"copy-{len(self._store.runs())}",
            project_id=request.destination_project_id or source.run.project_id,
            base_model=source.run.base_model,
            lora=source.run.lora,
            optimizer=source.run.optimizer,
            user_metadata=source.run.user_metadata,
            last_request_at=now(),
        )
        saved = self._store.save(
            self._store.add_run(run),
            source.checkpoint.checkpoint_id,
            source.weights,
            ttl_seconds=request.ttl_seconds,
            user_metadata=source.checkpoint.user_metadata,
        )
        answer = CopyWeightsResponse(tinker_path=saved.checkpoint.tinker_path)
        if key:
            self._copies[key] = answer
        return answer

    def storage_usage(self, received: ReceivedRequest) -> CurrentCheckpointStorageUsageResponse:
        """What the checkpoints of each project take."""
        wanted: str | None = received.request.project_id
        projects: dict[str, list[int]] = {}
        for run in self._store.runs():
            if wanted in (None, run.project_id):
                projects.setdefault(run.project_id, []).extend(self._store.sizes([run.run_id]))
        items = [
            CurrentCheckpointStorageUsageItem(
                project_id=project_id,
                user_name="test-user",
                checkpoint_count=len(sizes),
                size_bytes=sum(sizes),
                size_gigabytes=sum(sizes) / _GIGABYTE,
            )
            for project_id, sizes in projects.items()
        ]
        return CurrentCheckpointStorageUsageResponse(data=items)

    def _set_public(self, received: ReceivedRequest, is_public: bool) -> None:
        # Done already is no conflict: clients would retry a 409 for minutes.
        saved = self._named(received)
        saved.change(public=is_public)
        event = "checkpoint.published" if is_public else "checkpoint.unpublished"
        self._audit.add(event, {}, tinker_path=saved.checkpoint.tinker_path)

    def _named(self, received: ReceivedRequest) -> Saved:
        request: CheckpointRequest = received.request
        return self._store.find(request.training_run_id, request.checkpoint_id)


def _shown(run: Run) -> TrainingRun:
    last: dict[str, Checkpoint] = {}
    for saved in run.living().values():
        last[saved.checkpoint.checkpoint_type] = saved.checkpoint
    return TrainingRun(
        training_run_id=run.run_id,
        base_model=run.base_model,
        model_owner="test-user",
        is_lora=True,
        lora_rank=run.lora.rank,
        last_request_time=run.last_request_at,
        last_checkpoint=last.get("training"),
        last_sampler_checkpoint=last.get("sampler"),
        user_metadata=metadata_as_text(run.user_metadata),
    )


def _folder(saved: Saved) -> str:
    return saved.checkpoint.tinker_path.removeprefix("tinker://").replace(":", "-")


def _page(items: list[ItemT], offset: int, limit: int) -> tuple[list[ItemT], Cursor]:
    cursor = Cursor(offset=offset, limit=limit, total_count=len(items))
    return items[offset : offset + limit], cursor
