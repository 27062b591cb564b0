"""Deletes what is no longer needed, and counts the storage that checkpoints take.

`Sweeper.sweep` is to be called about every minute. It deletes expired checkpoints, weights of
samplers whose session has ended, snapshots of released models, and uploads that were not finished
in time; it has the ledger and the store delete what is theirs; and once an hour it counts
gigabyte-hours of storage. When the disk is nearly full it also deletes weights of unnamed samplers,
the least recently used first: a training loop makes such a sampler at every step, and nothing says
when it is done with one.

Files unknown to the ledger are never deleted. A ledger restored from a backup does not know the
newest ones, nor does one that shares the store with another.

It runs where the scheduler does, and its writes are conditional on the same lease. It may be killed
at any point: the next sweep finishes what was begun. Files are deleted before their entry, so that
nothing is forgotten that still takes space. A checkpoint that is being overwritten while its old
version expires is left alone.

A server that has lost its lease may be in the middle of a sweep, so it must delete only what no
later server can need: files of entries that are final, editions that their name no longer refers
to, and weights that the ledger has given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.paths import SAMPLERS, SNAPSHOTS, UPLOADS, CheckpointPath
from tinsmith.errors import CheckpointNotFoundError, TinkerError, UnknownEntryError
from tinsmith.service.api.listings import is_living
from tinsmith.service.api.weight_uploads import delete_upload
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.base import PAGE, Ledger
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    QueueId,
    SamplerEntry,
    SessionEntry,
    StorageCount,
    Swept,
    TenantId,
    UploadEntry,
    UsageKey,
    Use,
)

_log = logging.getLogger(__name__)

AT_ONCE = 200
"""The most checkpoints that one sweep deletes."""
EVERY_S = 3600.0
"""How often storage is counted, and all files are listed."""
ORPHANED_S = 3600.0
"""How long files that are no longer needed are kept."""
SHORT_BYTES = 5 * 10**9
"""With less free space than this, weights of unused samplers are deleted."""
UNUSED_S = 3 * 3600.0
"""A client with results still to come from a sampler has polled within this time."""
ROOM_EVERY_S = 600.0
"""How often all files are searched for them, unless there are more to delete at once."""
LONGEST_COUNT_S = 7 * 24 * 3600.0
"""Storage is also counted for a time in which no server ran, up to this long."""
STORAGE = "storage"
"""The kind of use that is counted here, in gigabyte-hours."""
GIGABYTE = 10**9
_COUNT = "storage"


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep did."""

    expired: int = 0
    """Checkpoints deleted because they expired."""
    uploads: int = 0
    """Uploads deleted because they were not finished in time."""
    abandoned: int = 0
    """Weights of ended samplers, and snapshots of released models."""
    unknown: int = 0
    """Files in the store that the ledger does not know, when it was last listed."""
    unused: int = 0
    """Weights of samplers deleted to free space."""
    remains: int = 0
    """What crashes and readers left behind in the store."""
    gigabyte_hours: float = 0.0
    ledger: Swept = Swept()
    problems: tuple[str, ...] = ()
    """What failed; the next sweep retries it."""


class Sweeper:
    """Sweeps one ledger and one store. For one event loop.

    Args:
        ledger: What it sweeps.
        store: Where checkpoints are, if there are any.
        epoch: Returns the epoch that its writes are conditional on, at the start of each sweep.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: CheckpointStore | None,
        epoch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._ledger = FencedLedger(ledger, None)
        self._whole = ledger
        self._epoch = epoch
        self._store = store
        self._looked_at: float | None = None
        self._room_due_at = 0.0
        self._orphans: dict[CheckpointPath, float] = {}
        self._unknown = 0

    async def sweep(self) -> SweepReport:
        """Do all of it once. Failures are reported and logged, and retried by the next sweep."""
        self._ledger = FencedLedger(self._whole, self._epoch())
        problems: list[str] = []
        report = SweepReport()
        steps: list[tuple[str, Callable[[SweepReport], Awaitable[SweepReport]]]] = [
            ("expired checkpoints", self._expire),
            ("unfinished uploads", self._end_uploads),
            ("abandoned files", self._abandon),
            ("the store", self._sweep_store),
            ("unused samplers", self._make_room),
            ("storage", self._count),
            ("the ledger", self._sweep_ledger),
        ]
        for name, step in steps:
            try:
                report = await step(report)
            except TinkerError as exc:
                _log.warning("sweeping %s: %s", name, exc)
                problems.append(f"{name}: {exc}")
        return msgspec.structs.replace(report, problems=tuple(problems))

    # Expired checkpoints

    async def _expire(self, report: SweepReport) -> SweepReport:
        now = self._ledger.now()
        count = 0
        for entry in await self._ledger.entries(CheckpointEntry).due(now, limit=AT_ONCE):
            count += await self._expire_one(entry, now)
        return msgspec.structs.replace(report, expired=count)

    async def _expire_one(self, entry: CheckpointEntry, now: float) -> bool:
        if self._store is not None and not await self._delete_files(entry):
            return False
        # Noted before the entry is deleted: nothing would come back to a missed note.
        await audit.note(
            self._ledger,
            entry.tenant_id,
            audit.CHECKPOINT_EXPIRED,
            run_id=entry.run_id,
            tinker_path=entry.id,
            change=audit.change_id("expire", entry.id, str(entry.expires_at)),
        )
        if not await self._ledger.entries(CheckpointEntry).remove(entry.id, due_before=now):
            return False
        await forget_empty_run(self._ledger, entry.run_id)
        return True

    async def _delete_files(self, entry: CheckpointEntry) -> bool:
        """Delete the files of an expired checkpoint; False if another one owns them by now."""
        store = self._store
        assert store is not None
        path = entry.files
        try:
            manifest = await asyncio.to_thread(store.info, path)
        except CheckpointNotFoundError:
            return True
        # While it is overwritten, the new files exist before their entry does.
        is_its_own = entry.details.get("version", manifest.version) == manifest.version
        if not is_its_own or await self._is_under_way(manifest.origin):
            return False
        kept = await self._ledger.entries(CheckpointEntry).get(entry.id)
        if kept is None or is_living(kept, self._ledger.now()):
            return False

        def delete() -> bool:
            if store.info(path).version != manifest.version:
                return False
            store.delete(path)
            return True

        try:
            return await asyncio.to_thread(delete)
        except CheckpointNotFoundError:
            return True

    async def _is_under_way(self, origin: str) -> bool:
        """Whether the command that wrote these files has not been settled."""
        try:
            return not (await self._ledger.command(origin)).is_settled
        except UnknownEntryError:
            return False

    # Uploads

    async def _end_uploads(self, report: SweepReport) -> SweepReport:
        if self._store is None:
            return report
        now, count = self._ledger.now(), 0
        for upload in await self._ledger.entries(UploadEntry).due(now, limit=AT_ONCE):
            count += await delete_upload(self._ledger, self._store, upload, due_before=now)
        return msgspec.structs.replace(report, uploads=count)

    # Files that are no longer needed

    async def _abandon(self, report: SweepReport) -> SweepReport:
        now = self._ledger.now()
        is_due = self._looked_at is None or now >= self._looked_at + EVERY_S
        if self._store is None or not is_due:
            return report
        store = self._store
        paths = await asyncio.to_thread(lambda: list(store.paths()))
        states = {path: await self._is_over(path) for path in paths}
        orphans = [path for path, is_over in states.items() if is_over]
        unknown = sum(is_over is None for is_over in states.values())
        if unknown and unknown != self._unknown:
            _log.warning(
                "the ledger does not know %d checkpoints or snapshots in the store; they are kept. "
                "If no other service uses them, delete them by hand",
                unknown,
            )
        self._unknown = unknown
        self._orphans = {path: self._orphans.get(path, now) for path in orphans}
        count = 0
        for path, seen_at in list(self._orphans.items()):
            if now >= seen_at + ORPHANED_S and count < AT_ONCE:
                if await self._is_over(path):  # checked again: listing may have taken long
                    await asyncio.to_thread(store.delete, path)
                    count += 1
                del self._orphans[path]
        self._looked_at = now
        return msgspec.structs.replace(report, abandoned=count, unknown=unknown)

    async def _is_over(self, path: CheckpointPath) -> bool | None:
        """Whether these files are no longer needed; None if the ledger does not know them."""
        if path.kind == SNAPSHOTS:
            model = await self._ledger.entries(ModelEntry).get(path.run_id)
            if model is None or model.released_at is not None:
                return None if model is None else True
            progress = await self._ledger.queue(QueueId(model.id))
            return _is_replaced(path, progress.snapshot)
        if path.kind == SAMPLERS:
            sampler = await self._ledger.entries(SamplerEntry).get(path.run_id)
            if sampler is None:
                return None
            session = await self._ledger.entries(SessionEntry).get(sampler.session_id)
            is_ended = session is None or session.ended_at is not None
            is_given_up = is_ended or sampler.dropped_at is not None
            return is_given_up or _is_replaced(path, sampler.model_path)
        if path.kind == UPLOADS:  # deleted with their upload
            upload = await self._ledger.entries(UploadEntry).get(path.run_id)
            return None if upload is None else False
        entry = await self._ledger.entries(CheckpointEntry).get(str(path.in_edition("")))
        return None if entry is None else _is_replaced(path, str(entry.files))

    async def _sweep_store(self, report: SweepReport) -> SweepReport:
        if self._store is None:
            return report
        remains = await asyncio.to_thread(self._store.sweep)
        return msgspec.structs.replace(report, remains=remains)

    # A nearly full disk

    async def _make_room(self, report: SweepReport) -> SweepReport:
        now = self._ledger.now()
        if self._store is None or now < self._room_due_at or not await self._is_short():
            return report
        store, count = self._store, 0
        for sampler, path in await self._unused_samplers(store):
            if count == AT_ONCE or not await self._is_short():
                break
            # Recorded first: a newer server must not rely on files about to be deleted.
            await self._ledger.entries(SamplerEntry).change(
                sampler.id, lambda kept: msgspec.structs.replace(kept, dropped_at=now)
            )
            count += await asyncio.to_thread(store.delete, path)
        self._room_due_at = now if count == AT_ONCE else now + ROOM_EVERY_S
        if count:
            _log.warning(
                "the disk is nearly full: deleted the weights of %d unnamed samplers that were not "
                "used for %g hours",
                count,
                UNUSED_S / 3600,
            )
        return msgspec.structs.replace(report, unused=count)

    async def _is_short(self) -> bool:
        assert self._store is not None
        free_bytes = await asyncio.to_thread(self._store.free_bytes)
        return free_bytes is not None and free_bytes < SHORT_BYTES

    async def _unused_samplers(
        self, store: CheckpointStore
    ) -> list[tuple[SamplerEntry, CheckpointPath]]:
        """Unnamed weights that were not used for a while, the least recently used first."""
        before, found = self._ledger.now() - UNUSED_S, []
        for path in await asyncio.to_thread(lambda: list(store.paths())):
            if path.kind != SAMPLERS:
                continue
            sampler = await self._ledger.entries(SamplerEntry).get(path.run_id)
            if sampler is not None:
                progress = await self._ledger.queue(QueueId(sampler.id))
                used_at = progress.asked_at or sampler.created_at
                if used_at < before:
                    found.append((used_at, sampler, path))
        return [(sampler, path) for _, sampler, path in sorted(found, key=lambda one: one[0])]

    async def _sweep_ledger(self, report: SweepReport) -> SweepReport:
        return msgspec.structs.replace(report, ledger=await self._ledger.sweep())

    # Storage

    async def _count(self, report: SweepReport) -> SweepReport:
        """Count gigabyte-hours since the last time, if that is an hour ago.

        Recorded before it is counted: a crash in between loses an hour, and charges none twice.
        """
        now = self._ledger.now()
        since = await self._take_turn(now)
        if since is None:
            return report
        hours = min(now - since, LONGEST_COUNT_S) / 3600.0
        uses = [
            Use(key=key, amount=size / GIGABYTE * hours)
            for key, size in (await self._sizes(now)).items()
            if size
        ]
        if uses:
            await self._ledger.add_uses(uses)
        return msgspec.structs.replace(report, gigabyte_hours=sum(use.amount for use in uses))

    async def _take_turn(self, now: float) -> float | None:
        """The time to count from, if no other server counts; moves the mark to now."""
        counts = self._ledger.entries(StorageCount)
        first = StorageCount(id=_COUNT, tenant_id=TenantId(""), created_at=now, counted_until=now)
        since = (await counts.add(first)).counted_until
        if now < since + EVERY_S:
            return None

        def moved(kept: StorageCount) -> StorageCount:
            if kept.counted_until != since:
                raise _TurnTakenError("another server counts this hour")
            return msgspec.structs.replace(kept, counted_until=now)

        try:
            await counts.change(_COUNT, moved)
        except _TurnTakenError:
            return None
        return since

    async def _sizes(self, now: float) -> dict[UsageKey, int]:
        """Bytes of all checkpoints, by owner."""
        sizes: dict[UsageKey, int] = {}
        models: dict[str, ModelEntry | None] = {}
        offset = 0
        while page := await self._ledger.entries(CheckpointEntry).all(limit=PAGE, offset=offset):
            offset += len(page)
            for entry in page:
                if not is_living(entry, now):
                    continue
                if entry.run_id not in models:
                    models[entry.run_id] = await self._ledger.entries(ModelEntry).get(entry.run_id)
                model = models[entry.run_id]
                key = UsageKey(
                    tenant_id=entry.tenant_id,
                    kind=STORAGE,
                    session_id=model.session_id if model is not None else "",
                    base_model=model.base_model if model is not None else "",
                )
                sizes[key] = sizes.get(key, 0) + entry.size_bytes
        return sizes


def _is_replaced(path: CheckpointPath, named: str | None) -> bool:
    """Whether the ledger refers to an edition of a later epoch.

    Nothing can refer to this edition then. One of the same epoch may be about to be referred to,
    and one of a later epoch exists if the ledger was restored from a backup.
    """
    return named is not None and path.epoch < CheckpointPath.parse(named).epoch


class _TurnTakenError(Exception):
    """Another server has counted this hour."""


async def forget_empty_run(ledger: Ledger | FencedLedger, run_id: str) -> ModelEntry | None:
    """Delete a run that only holds checkpoints, once they are gone; returns it if so.

    It was made to hold a copy, or its session has been deleted.
    """
    model = await ledger.entries(ModelEntry).get(run_id)
    if model is None:
        return None
    if model.session_id and await ledger.entries(SessionEntry).get(model.session_id) is not None:
        return None
    if await ledger.entries(CheckpointEntry).of_parent(run_id, limit=1):
        return None
    await ledger.entries(ModelEntry).remove(run_id)
    return model
