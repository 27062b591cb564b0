"""Iterates over a tenant's entries, and formats runs, checkpoints and times for answers.

An expired checkpoint is gone for its owner at once, although the sweeper may delete it later: every
listing leaves it out.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import BadRequestError, shown
from tinsmith.service.ledger.base import PAGE, Entries, Ledger
from tinsmith.service.ledger.model_config import read_config
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    Entry,
    ModelEntry,
    QueueId,
    SessionEntry,
    TenantId,
)
from tinsmith.types.checkpoints import Checkpoint, ParsedCheckpointTinkerPath
from tinsmith.types.runs import TrainingRun

E = TypeVar("E", bound=Entry)

MOST_LISTED = 1000
"""The largest page that can be requested."""
LARGEST_OFFSET = 2**31
DEFAULT_PROJECT = "default"
"""The project of sessions that name none."""
PROJECT = "project_id"
"""The key in `Model.config` for runs without a session."""


def check_page(limit: int, offset: int = 0) -> None:
    """Raise `BadRequestError` for an invalid or too large page."""
    if not 1 <= limit <= MOST_LISTED:
        raise BadRequestError(f"limit is {shown(limit)}; it must be 1 to {MOST_LISTED}")
    if not 0 <= offset <= LARGEST_OFFSET:
        raise BadRequestError(f"offset is {shown(offset)}; it must be 0 to {LARGEST_OFFSET}")


async def of_tenant(entries: Entries[E], tenant_id: TenantId) -> AsyncIterator[E]:
    """All entries of a tenant, newest first."""
    async for entry in _all(functools.partial(entries.of_tenant, tenant_id)):
        yield entry


async def of_parent(entries: Entries[E], parent_id: str, tenant_id: TenantId) -> list[E]:
    """All entries of a tenant with one parent, newest first."""
    found = _all(functools.partial(entries.of_parent, parent_id))
    return [entry async for entry in found if entry.tenant_id == tenant_id]


async def _all(page_of: Callable[..., Awaitable[Sequence[E]]]) -> AsyncIterator[E]:
    """Page after page. New entries shift the pages; an entry is yielded once."""
    seen: set[str] = set()
    offset, is_last = 0, False
    while not is_last:
        page = await page_of(limit=PAGE, offset=offset)
        offset, is_last = offset + len(page), len(page) < PAGE
        for entry in page:
            if entry.id not in seen:
                seen.add(entry.id)
                yield entry


# Times, owners, metadata


def moment(seconds: float) -> datetime.datetime:
    """A time of the ledger, with its offset from UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def owner_urn(tenant_id: str) -> str:
    """The name of a tenant as an owner, as in tokens."""
    return f"tml:user:{tenant_id}"


def metadata_as_text(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata for an answer: values other than strings are written as JSON."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }


# Checkpoints


def is_living(entry: CheckpointEntry, now: float) -> bool:
    """Whether a checkpoint has not expired."""
    return entry.expires_at is None or entry.expires_at > now


async def checkpoints_of_run(ledger: Ledger, model: ModelEntry) -> list[CheckpointEntry]:
    """The unexpired checkpoints of a run, newest first."""
    found = await of_parent(ledger.entries(CheckpointEntry), model.id, model.tenant_id)
    now = ledger.now()
    return [entry for entry in found if is_living(entry, now)]


def shown_checkpoint(entry: CheckpointEntry) -> Checkpoint:
    """A checkpoint, as listings show it."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(entry.id)
    return Checkpoint(
        checkpoint_id=entry.checkpoint_id,
        checkpoint_type=parsed.checkpoint_type,
        time=moment(entry.created_at),
        tinker_path=entry.id,
        size_bytes=entry.size_bytes,
        public=entry.is_published,
        user_metadata=entry.user_metadata,
        expires_at=None if entry.expires_at is None else moment(entry.expires_at),
        base_model=entry.details.get("base_model"),
    )


# Runs


async def shown_run(ledger: Ledger, model: ModelEntry) -> TrainingRun:
    """A run, as listings show it."""
    last: dict[str, Checkpoint] = {}
    saved = await checkpoints_of_run(ledger, model)
    for entry in saved:
        one = shown_checkpoint(entry)
        last.setdefault(one.checkpoint_type, one)
    known_at = max([model.created_at, *(entry.created_at for entry in saved)])
    progress = await ledger.queue(QueueId(model.id))
    lora, _ = read_config(model.config)
    session = await ledger.entries(SessionEntry).get(model.session_id)
    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=model.tenant_id,
        is_lora=True,
        lora_rank=lora.rank,
        last_request_time=moment(progress.asked_at or known_at),
        last_checkpoint=last.get("training"),
        last_sampler_checkpoint=last.get("sampler"),
        user_metadata=metadata_as_text(model.user_metadata),
        display_name=None if session is None else session.display_name,
        steps=model.steps,
        loss_per_token=model.loss_per_token,
    )


class Projects:
    """The projects of runs: that of the session, or for a copy the one that it names."""

    def __init__(self, ledger: Ledger) -> None:
        self._sessions = ledger.entries(SessionEntry)
        self._known: dict[str, str] = {}

    async def of_run(self, model: ModelEntry) -> str:
        """A run's project."""
        own = model.config.get(PROJECT)
        if isinstance(own, str):
            return own
        if model.session_id not in self._known:
            session = await self._sessions.get(model.session_id)
            self._known[model.session_id] = session.project_id if session else DEFAULT_PROJECT
        return self._known[model.session_id]
