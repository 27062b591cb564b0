"""Adapters on their way in: files that come in parts, until they are made a checkpoint.

What has come lies in a folder that the store stages and that is never committed; the checkpoint is
written beside it, by `checkpoints/imported.py`, which checks every number. What is under way is
known to this server alone: after a restart its client begins again, and the store sweeps the files.

Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tinsmith.checkpoints.base import CheckpointStore, Staging
from tinsmith.checkpoints.format import Adapter
from tinsmith.checkpoints.imported import import_adapter
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import BadRequestError, NotFoundError, RateLimitError, shown
from tinsmith.ledger.records import TenantId
from tinsmith.server.parts import Parts
from tinsmith.server.store_threads import StoreThreads
from tinsmith.types.buffers import Memory
from tinsmith.types.imports import IMPORTED_FILES, BeginImportRequest

LARGEST_CONFIG = 1024 * 1024
MOST_OF_TENANT = 4
MOST_UNDER_WAY = 16
IDLE_S = 1800.0
"""An import of which nothing was heard for so long is given up."""


class Import:
    """One adapter on its way in."""

    def __init__(
        self, import_id: str, tenant_id: TenantId, request: BeginImportRequest, scratch: Staging
    ) -> None:
        self.import_id = import_id
        self.tenant_id = tenant_id
        self.request = request
        self.path = CheckpointPath(import_id, "weights", request.name)
        self.heard_at = 0.0
        self.turn = asyncio.Lock()
        self._scratch = scratch
        self._received = dict.fromkeys(request.files, 0)

    def write(self, name: str, offset: int, part: Memory) -> None:
        """Take a part of a file; blocks. One that has come before may come again.

        Raises:
            BadRequestError: It is not of a file, leaves a gap, or is too much.
        """
        size = self.request.files.get(name)
        if size is None:
            raise NotFoundError(f"there is no file {shown(name)} in import {self.import_id}")
        received = self._received[name]
        if not 0 <= offset <= received:
            raise BadRequestError(f"offset is {shown(offset)}; {name} is there up to {received}")
        if offset + len(part) > size:
            raise BadRequestError(
                f"{name} would have {offset + len(part)} bytes; {size} were announced"
            )
        file = self._scratch.folder / name
        file.touch()
        with file.open("r+b") as content:
            content.seek(offset)
            content.write(part)
        self._received[name] = max(received, offset + len(part))

    def check_complete(self) -> None:
        """Raise `BadRequestError` if something of it has not come."""
        for name, size in self.request.files.items():
            if self._received[name] != size:
                raise BadRequestError(
                    f"{name} has {self._received[name]} of {size} bytes; send the rest first"
                )

    def finish(self, store: CheckpointStore, base_model: str) -> tuple[Adapter, Manifest]:
        """Check what has come and make it a checkpoint; blocks.

        Raises:
            CheckpointFormatError: It is no adapter that can be trained.
        """
        with store.begin(self.path, origin=self.import_id) as staging:
            adapter = import_adapter(
                self._scratch.folder,
                staging.folder,
                base_model=base_model,
                max_bytes=self.request.files[IMPORTED_FILES[1]],
            )
            return adapter, staging.commit()

    def config(self) -> dict[str, Any]:
        """What `adapter_config.json` says; blocks. Empty if it is no JSON object."""
        try:
            text = (self._scratch.folder / IMPORTED_FILES[0]).read_bytes()
            found = msgspec.json.decode(text)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def discard(self) -> None:
        """Delete what has come; blocks."""
        self._scratch.discard()


class Imports:
    """What is under way at one server. For one event loop."""

    def __init__(self, parts: Parts, threads: StoreThreads) -> None:
        self._threads = threads
        self.finishing = asyncio.Lock()
        """One adapter at a time is read into the memory."""
        self._ledger = parts.ledger
        self._store: CheckpointStore | None = parts.store
        self._largest = parts.settings.import_bytes if parts.store is not None else 0
        self._under_way: dict[str, Import] = {}
        self._beginning = asyncio.Lock()
        """Those that begin at the same moment are counted one after the other."""

    @property
    def largest_bytes(self) -> int:
        """Of one adapter; 0 if none is taken."""
        return self._largest

    async def begin(
        self, import_id: str, tenant_id: TenantId, request: BeginImportRequest
    ) -> Import:
        """Start an import, or find it if it was started.

        Raises:
            BadRequestError: What is announced is no adapter, or too large.
            RateLimitError: Too many are under way.
        """
        self._check(request)
        async with self._beginning:
            await self._give_up_idle()
            found = self._under_way.get(import_id)
            if found is not None and found.tenant_id == tenant_id:
                return found
            of_tenant = sum(one.tenant_id == tenant_id for one in self._under_way.values())
            if of_tenant >= MOST_OF_TENANT or len(self._under_way) >= MOST_UNDER_WAY:
                raise RateLimitError(
                    f"{MOST_OF_TENANT} imports of a tenant, and {MOST_UNDER_WAY} of all, may be "
                    "under way",
                    retry_after_s=30.0,
                )
            assert self._store is not None
            path = CheckpointPath(import_id, "weights", request.name)
            scratch = await self._threads.run(self._store.begin, path)
            made = Import(import_id, tenant_id, request, scratch)
            made.heard_at = self._ledger.now()
            self._under_way[import_id] = made
            return made

    def find(self, import_id: str, tenant_id: TenantId) -> Import:
        """A tenant's import; raises `NotFoundError`."""
        found = self._under_way.get(import_id)
        if found is None or found.tenant_id != tenant_id:
            raise NotFoundError(f"there is no import {import_id!r:.200}; begin it again")
        found.heard_at = self._ledger.now()
        return found

    async def end(self, given: Import) -> None:
        """Let go of an import and what came of it."""
        self._under_way.pop(given.import_id, None)
        await self._threads.run(given.discard)

    async def _give_up_idle(self) -> None:
        before = self._ledger.now() - IDLE_S
        for one in list(self._under_way.values()):
            if one.heard_at < before and not one.turn.locked():
                await self.end(one)

    def _check(self, request: BeginImportRequest) -> None:
        if not self._largest:
            raise NotFoundError("this service imports no adapters")
        if set(request.files) != set(IMPORTED_FILES):
            raise BadRequestError(
                f"files is {shown(sorted(request.files))}; an adapter is "
                f"{' and '.join(IMPORTED_FILES)}"
            )
        bounds = dict(zip(IMPORTED_FILES, (LARGEST_CONFIG, self._largest), strict=True))
        for name, most in bounds.items():
            if not 1 <= request.files[name] <= most:
                raise BadRequestError(
                    f"files[{name!r}] is {shown(request.files[name])}; it may be 1 to {most} bytes"
                )
