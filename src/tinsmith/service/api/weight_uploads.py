"""Adapters that were trained elsewhere: files that arrive one by one, until they are a checkpoint.

An upload is an entry of the ledger. A file that has arrived whole is written to the store, at a
place of its own that nobody else knows, and then named in the entry; so a broken `PUT` leaves
nothing, and one that is repeated replaces the file in one step. All of this survives a restart, and
any server on the same ledger and store can receive the next file.

`finish` *seals* the entry, so that no file changes any more, checks every number
(`checkpoints/imported.py`), commits the checkpoint, names it in the ledger, and deletes the upload.
Each of these steps may be repeated, by a retry or after a crash. The checkpoint is in a run of its
own, which has the id of the upload and cannot be trained itself.

An upload that is not finished in time is deleted by the sweeper. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from tinsmith.checkpoints.base import PIECE_BYTES, CheckpointStore, Staging
from tinsmith.checkpoints.format import ADAPTER_CONFIG, ADAPTER_MODEL, StoredAdapter
from tinsmith.checkpoints.imported import import_adapter
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import UPLOADS, CheckpointPath
from tinsmith.engine.base import BaseModel
from tinsmith.errors import (
    APIStatusError,
    BadRequestError,
    BodyTooLargeError,
    CheckpointDamagedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConflictError,
    NotFoundError,
    RateLimitError,
    TinkerError,
    UnknownEntryError,
)
from tinsmith.service.api.admission import Quotas
from tinsmith.service.api.incoming import ClientLeftError
from tinsmith.service.api.listings import PROJECT
from tinsmith.service.api.store_threads import StoreThreads
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.model_config import write_config
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    SessionId,
    TenantId,
    UploadedFile,
    UploadEntry,
)
from tinsmith.types.buffers import Memory
from tinsmith.types.training import LoraConfig

_log = logging.getLogger(__name__)

URLS_S = 3600.0
"""How long the URLs of an upload are valid."""
KEPT_S = 2 * URLS_S
"""How long an upload is kept: a `PUT` that began in time may take a while, and so may `finish`."""
MOST_OPEN = 16
"""The most uploads of one tenant that are not finished."""
MOST_RECEIVED = 8
"""The most files that one tenant can send to one server at a time."""
LARGEST_CONFIG = 1024 * 1024
PREFIX = "upload"
"""The ids of uploads, and of the runs that hold what was uploaded, start with this."""
NAME = "adapter"
"""The name of the checkpoint within its run."""

FILES = (ADAPTER_CONFIG, ADAPTER_MODEL)
"""The files of an adapter, as `save_weights_external` and `peft` write them."""

_ID = re.compile(PREFIX + r"-[0-9a-f]{32}")


class WeightUploads:
    """The uploads of one service. For one event loop.

    Args:
        ledger: Where they are noted.
        base_models: By name.
        store: Where files and checkpoints go; None for a service without.
        largest_bytes: The largest adapter; 0 if none is accepted.
        threads: For calls of the store.
        quotas: Storage that tenants may use.

    Attributes:
        receiving: How many files each tenant is sending to this server.
    """

    def __init__(
        self,
        ledger: Ledger,
        base_models: Mapping[str, BaseModel],
        store: CheckpointStore | None,
        largest_bytes: int,
        threads: StoreThreads,
        quotas: Quotas,
    ) -> None:
        self._ledger = ledger
        self._entries = ledger.entries(UploadEntry)
        self._base_models = base_models
        self._given_store = store
        self._largest = largest_bytes
        self._threads = threads
        self._quotas = quotas
        self.receiving: Counter[TenantId] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reading = asyncio.Lock()
        """One adapter at a time is read into memory."""

    @property
    def _store(self) -> CheckpointStore:
        if self._given_store is None or not self._largest:
            raise NotFoundError("this service takes no uploads of weights")
        return self._given_store

    # Start

    async def start(self, upload: UploadEntry) -> UploadEntry:
        """Note an upload; the one with its id, if there is one.

        Raises:
            NotFoundError: The service takes no uploads.
            RateLimitError: The tenant has too many that are not finished.
            UnprocessableEntityError: Its storage is used up.
        """
        assert self._store is not None
        tenant_id = upload.tenant_id
        async with self._quotas.turn(tenant_id):
            known = await self._entries.get(upload.id)
            if known is not None:
                return known
            waiting = await self._open_uploads(tenant_id)
            if len(waiting) >= MOST_OPEN:
                raise RateLimitError(
                    f"{len(waiting)} uploads are not finished, and {MOST_OPEN} are allowed; finish "
                    f"them, or wait: each is deleted {KEPT_S / 3600:g} hours after its start",
                    retry_after_s=30.0,
                )
            await self._quotas.check_storage(tenant_id, _bytes_of(waiting))
            return await self._entries.add(upload)

    async def _open_uploads(self, tenant_id: TenantId) -> list[UploadEntry]:
        now = self._ledger.now()
        return [one for one in await self._entries.of_tenant(tenant_id) if one.expires_at > now]

    async def find(self, tenant_id: TenantId, upload_id: str) -> UploadEntry:
        """A tenant's upload; raises `NotFoundError`."""
        found = await self._entries.get(upload_id)
        if found is None or found.tenant_id != tenant_id or found.expires_at <= self._ledger.now():
            raise _unknown(upload_id)
        return found

    # Files

    async def receive(
        self,
        tenant_id: TenantId,
        upload_id: str,
        name: str,
        pieces: AsyncIterator[Memory | None],
        *,
        announced_bytes: int = 0,
        sha256: str | None = None,
    ) -> UploadedFile:
        """Receive a whole file, in place of what was sent under this name before.

        Args:
            tenant_id: Whose upload it is.
            upload_id: Which one.
            name: The name of the file.
            pieces: Its content; None in the end if its sender left.
            announced_bytes: Its size, if it is known.
            sha256: The digest that it must have, in hexadecimal.

        Raises:
            NotFoundError: There is no such upload, or no such file in it.
            ConflictError: The upload is being finished.
            BadRequestError: The file is empty, or not the one that was to be sent.
            BodyTooLargeError: It is larger than allowed.
            ClientLeftError: It did not arrive whole.
        """
        upload = await self.find(tenant_id, upload_id)
        if name not in FILES:
            raise NotFoundError(f"an upload has no file {name!r:.80}; it has {' and '.join(FILES)}")
        if upload.is_sealed:
            raise _sealed(upload_id)
        waiting = await self._open_uploads(tenant_id)
        await self._quotas.check_storage(tenant_id, _bytes_of(waiting) + announced_bytes)
        place = CheckpointPath.uploaded(upload_id)
        with self._count_receiving(tenant_id):
            staging = await self._threads.run(self._store.begin, place)
            try:
                most = LARGEST_CONFIG if name == ADAPTER_CONFIG else self._largest
                size, digest = await self._write(staging.folder / name, pieces, most)
                if sha256 not in (None, digest):
                    raise BadRequestError(
                        f"{name} arrived with SHA-256 {digest}, and {sha256} was announced; send "
                        "it again"
                    )
            except BaseException:
                await self._threads.run(staging.discard)
                raise
            await self._commit(staging)
        file = UploadedFile(place=str(place), size_bytes=size, sha256=digest)
        await self._name(upload_id, name, file)
        return file

    @contextlib.contextmanager
    def _count_receiving(self, tenant_id: TenantId) -> Iterator[None]:
        if self.receiving[tenant_id] >= MOST_RECEIVED:
            raise RateLimitError(
                f"{MOST_RECEIVED} files of yours are being received; send fewer at once",
                retry_after_s=5.0,
            )
        self.receiving[tenant_id] += 1
        try:
            yield
        finally:
            self.receiving[tenant_id] -= 1
            if not self.receiving[tenant_id]:
                del self.receiving[tenant_id]

    async def _write(
        self, file: Path, pieces: AsyncIterator[Memory | None], most: int
    ) -> tuple[int, str]:
        """Write what arrives; returns its size and digest."""
        digest, size, held = hashlib.sha256(), 0, bytearray()

        def flush() -> None:
            digest.update(held)
            content.write(held)
            held.clear()

        with await self._threads.run(file.open, "wb") as content:
            async for piece in pieces:
                if piece is None:
                    raise ClientLeftError
                size += len(piece)
                if size > most:
                    raise BodyTooLargeError(f"{file.name} is larger than {most} bytes")
                held += piece
                if len(held) >= PIECE_BYTES:
                    await self._threads.run(flush)
            await self._threads.run(flush)
        if not size:
            raise BadRequestError(f"{file.name} is empty; send its content as the body")
        return size, digest.hexdigest()

    async def _commit(self, staging: Staging) -> None:
        """Make a received file durable. The thread goes on when this is cancelled."""
        committing = asyncio.ensure_future(self._threads.run(staging.commit))
        try:
            await asyncio.shield(committing)
        finally:
            await asyncio.wait((committing,))

    async def _name(self, upload_id: str, name: str, file: UploadedFile) -> None:
        """Make a file that of the upload, and delete the one before."""
        replaced: list[UploadedFile] = []

        def changed(old: UploadEntry) -> UploadEntry:
            if old.is_sealed:
                raise _sealed(upload_id)
            replaced[:] = [old.files[name]] if name in old.files else []
            return msgspec.structs.replace(old, files={**old.files, name: file})

        try:
            await self._entries.change(upload_id, changed)
        except (UnknownEntryError, ConflictError) as exc:
            await self._delete(file)
            raise (_unknown(upload_id) if isinstance(exc, UnknownEntryError) else exc) from None
        for old in replaced:
            await self._delete(old)

    async def _delete(self, file: UploadedFile) -> None:
        """Delete a file that no upload names; what fails is deleted with the upload."""
        try:
            await self._threads.run(self._store.delete, CheckpointPath.parse(file.place))
        except TinkerError as exc:
            _log.warning("could not delete %s: %s", file.place, exc)

    # Finish

    async def finish(self, tenant_id: TenantId, upload_id: str) -> CheckpointEntry:
        """Make a checkpoint of what was received; the one that exists, if it was made before.

        Raises:
            NotFoundError: There is no such upload.
            BadRequestError: A file is missing, or they are not the announced adapter. Files can be
                sent again.
            ConflictError: A file was replaced meanwhile.
        """
        if not _ID.fullmatch(upload_id):
            raise _unknown(upload_id)
        turn = self._turns.setdefault(upload_id, asyncio.Lock())
        async with turn:
            made = await self._made(tenant_id, upload_id)
            if made is not None:
                return made
            upload = await self._seal(await self.find(tenant_id, upload_id))
            try:
                base = self._base_models.get(upload.base_model)
                if base is None:
                    raise BadRequestError(
                        f"base_model is {upload.base_model!r:.200}, which this service no longer "
                        "has; start another upload"
                    )
                await self._quotas.check_storage(tenant_id)
                async with self._reading:
                    adapter, manifest = await self._threads.run(self._make, upload, base)
            except (CheckpointNotFoundError, CheckpointDamagedError) as exc:
                made = await self._made(tenant_id, upload_id)
                if made is not None:  # another server was faster
                    return made
                await self._unseal(upload_id)
                raise ConflictError(
                    f"a file of upload {upload_id} is no longer there; send both files again, then "
                    "finish"
                ) from exc
            except (APIStatusError, CheckpointFormatError) as exc:
                await self._unseal(upload_id)
                if isinstance(exc, APIStatusError):
                    raise
                raise BadRequestError(str(exc)) from exc
            made = await self._record(upload, adapter, manifest)
            try:
                await delete_upload(self._ledger, self._store, upload)
            except TinkerError as exc:  # the sweeper tries again
                _log.warning("could not delete upload %s: %s", upload_id, exc)
            return made

    async def _made(self, tenant_id: TenantId, upload_id: str) -> CheckpointEntry | None:
        """What an earlier call made."""
        path = str(_path_of(upload_id))
        found = await self._ledger.entries(CheckpointEntry).get(path)
        return found if found is not None and found.tenant_id == tenant_id else None

    async def _seal(self, upload: UploadEntry) -> UploadEntry:
        expires_at = max(upload.expires_at, self._ledger.now() + URLS_S)

        def changed(old: UploadEntry) -> UploadEntry:
            missing = [name for name in FILES if name not in old.files]
            if missing:
                raise BadRequestError(
                    f"upload {old.id} has no {' and no '.join(missing)} yet; send each file with a "
                    "PUT to its URL, then finish"
                )
            return msgspec.structs.replace(old, is_sealed=True, expires_at=expires_at)

        try:
            return await self._entries.change(upload.id, changed)
        except UnknownEntryError:
            raise _unknown(upload.id) from None

    async def _unseal(self, upload_id: str) -> None:
        with contextlib.suppress(UnknownEntryError):
            await self._entries.change(
                upload_id, lambda old: msgspec.structs.replace(old, is_sealed=False)
            )

    def _make(self, upload: UploadEntry, base: BaseModel) -> tuple[StoredAdapter, Manifest]:
        """Check the files and commit them as a checkpoint; blocks."""
        store, path = self._store, _path_of(upload.id)
        with contextlib.ExitStack() as held:
            gathered = held.enter_context(store.begin(path)).folder  # never committed
            for name, file in upload.files.items():
                place = CheckpointPath.parse(file.place)
                reading = held.enter_context(store.open_whole(place))
                kept = reading.manifest.file(name)
                if kept is None or kept.sha256 != file.sha256:
                    raise CheckpointDamagedError(f"{place} is not the file that was received")
                (gathered / name).symlink_to(reading.folder / name)
            staging = held.enter_context(store.begin(path, origin=upload.id))
            adapter = import_adapter(
                gathered, staging.folder, base_model=base.name, max_bytes=self._largest
            )
            _check_fit(adapter, msgspec.convert(upload.lora_config, LoraConfig), base)
            return adapter, staging.commit()

    async def _record(
        self, upload: UploadEntry, adapter: StoredAdapter, manifest: Manifest
    ) -> CheckpointEntry:
        """Add the run and the checkpoint to the ledger."""
        path, now = _path_of(upload.id), self._ledger.now()
        config = write_config(adapter.lora_config(), None)
        model = ModelEntry(
            id=upload.id,
            tenant_id=upload.tenant_id,
            created_at=now,
            session_id=SessionId(""),
            base_model=adapter.base_model,
            config={**config, **({PROJECT: upload.project_id} if upload.project_id else {})},
            released_at=now,  # not loaded in any engine
        )
        await self._ledger.entries(ModelEntry).add(model)
        entry = CheckpointEntry(
            id=str(path),
            tenant_id=upload.tenant_id,
            created_at=now,
            run_id=upload.id,
            checkpoint_id=path.checkpoint_id,
            size_bytes=manifest.size_bytes,
            user_metadata=upload.user_metadata,
            # Without the version of its files: they are written once, by whichever server.
            details={"base_model": adapter.base_model, **config, "has_optimizer": False},
        )
        kept = await self._ledger.entries(CheckpointEntry).add(entry)
        await audit.note(
            self._ledger,
            upload.tenant_id,
            audit.CHECKPOINT_IMPORTED,
            details={name: file.sha256 for name, file in upload.files.items()},
            run_id=upload.id,
            tinker_path=entry.id,
            change=audit.change_id("imported", entry.id),
        )
        return kept


async def delete_upload(
    ledger: Ledger | FencedLedger,
    store: CheckpointStore,
    upload: UploadEntry,
    *,
    due_before: float | None = None,
) -> bool:
    """Delete an upload with its files, also those that a crash has left unnamed.

    Files are deleted before their entry, so that nothing is forgotten that takes space.
    """

    def delete_files() -> None:
        for path in list(store.paths(upload.id)):
            if path.kind == UPLOADS:
                store.delete(path)

    await asyncio.to_thread(delete_files)
    return await ledger.entries(UploadEntry).remove(upload.id, due_before=due_before)


def _check_fit(adapter: StoredAdapter, lora: LoraConfig, base: BaseModel) -> None:
    """Refuse an adapter that is not the announced one, or not one of the base model."""
    if adapter.rank != lora.rank:
        raise CheckpointFormatError(
            f"the adapter has rank {adapter.rank}, and lora_config says {lora.rank}"
        )
    found = adapter.lora_config()
    for field, what in (
        ("train_attn", "attention layers"),
        ("train_mlp", "MLP layers"),
        ("train_unembed", "the output layer"),
    ):
        has, announced = getattr(found, field), getattr(lora, field)
        if has != announced:
            raise CheckpointFormatError(
                f"the adapter has {'' if has else 'no '}weights of {what}, and lora_config says "
                f"{field}={announced}"
            )
    for module, pair in adapter.layers.items() if base.layers else ():
        size = base.layers.get(module)
        if size is None:
            raise CheckpointFormatError(
                f"the adapter has weights of {module}, which {base.name} does not have"
            )
        if (pair.b.shape[0], pair.a.shape[1]) != tuple(size):
            raise CheckpointFormatError(
                f"the adapter's {module} maps {pair.a.shape[1]} to {pair.b.shape[0]} features, and "
                f"that of {base.name} {size[1]} to {size[0]}"
            )


def _bytes_of(uploads: list[UploadEntry]) -> int:
    return sum(file.size_bytes for one in uploads for file in one.files.values())


def _path_of(upload_id: str) -> CheckpointPath:
    return CheckpointPath(upload_id, "external_weights", NAME)


def _unknown(upload_id: str) -> NotFoundError:
    return NotFoundError(f"there is no upload {upload_id!r:.200}; start it again")


def _sealed(upload_id: str) -> ConflictError:
    return ConflictError(f"upload {upload_id} is being finished; its files cannot change any more")
