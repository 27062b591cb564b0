"""Commands and entries in memory, for `MemoryLedger`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from tinsmith.errors import UnknownEntryError
from tinsmith.service.ledger.base import PAGE, Entries
from tinsmith.service.ledger.records import Command, CommandState, Entry, QueueId, TenantId


class KeptCommand:
    """A command and its bytes."""

    def __init__(self, command: Command, payload: bytes) -> None:
        self.command = command
        self.payload: bytes | None = payload
        self.result: bytes | None = None
        self.cursor = 0

    def change(self, **fields: Any) -> None:
        """Set fields of the command."""
        self.command = msgspec.structs.replace(self.command, **fields)

    def was_settled_before(self, moment: float) -> bool:
        """Whether it ended earlier than that."""
        return self.command.settled_at is not None and self.command.settled_at < moment


class MemoryCommands:
    """All commands, in the order in which they were appended."""

    def __init__(self) -> None:
        self._all: dict[str, KeptCommand] = {}
        self._by_queue: dict[QueueId, dict[str, KeptCommand]] = {}
        self._open: dict[CommandState, dict[str, KeptCommand]] = {
            CommandState.PENDING: {},
            CommandState.CLAIMED: {},
        }
        self.cancelled: dict[str, KeptCommand] = {}
        """Those that were cancelled while claimed, until their claimer is told."""
        self.kept_bytes = 0
        """Of all payloads and results."""

    def add(self, command: Command, payload: bytes) -> None:
        """Keep a pending command."""
        kept, request = KeptCommand(command, payload), command.request_id
        self._all[request] = self._open[CommandState.PENDING][request] = kept
        self._by_queue.setdefault(command.queue_id, {})[request] = kept
        self.kept_bytes += len(payload)

    def drop_payload(self, kept: KeptCommand) -> None:
        """Let go of a payload, if it is still there."""
        self.kept_bytes -= len(kept.payload or b"")
        kept.payload = None

    def keep_result(self, kept: KeptCommand, result: bytes) -> None:
        """Keep what a command gave."""
        self.kept_bytes += len(result)
        kept.result = result

    def drop_result(self, kept: KeptCommand) -> None:
        """Let go of a result, if it is still there."""
        self.kept_bytes -= len(kept.result or b"")
        kept.result = None
        kept.change(is_gone=True)

    def find(self, request_id: str) -> KeptCommand | None:
        """The command with this id."""
        return self._all.get(request_id)

    def known(self, request_id: str) -> KeptCommand:
        """The command with this id; raises `UnknownEntryError`."""
        kept = self._all.get(request_id)
        if kept is None:
            raise UnknownEntryError(f"there is no request {request_id!r:.200}")
        return kept

    def all(self) -> list[KeptCommand]:
        """All of them."""
        return list(self._all.values())

    def of_queue(self, queue_id: QueueId) -> list[KeptCommand]:
        """Those of one queue."""
        return list(self._by_queue.get(queue_id, {}).values())

    def pending(self) -> list[KeptCommand]:
        """Those that wait to be claimed."""
        return self._of_state(CommandState.PENDING)

    def claimed(self) -> list[KeptCommand]:
        """Those that are claimed."""
        return self._of_state(CommandState.CLAIMED)

    def _of_state(self, state: CommandState) -> list[KeptCommand]:
        return sorted(self._open[state].values(), key=lambda kept: kept.command.ordinal)

    def move(self, kept: KeptCommand, state: CommandState, **fields: Any) -> None:
        """Change a command's state, and other fields with it."""
        request = kept.command.request_id
        del self._open[kept.command.state][request]
        if state in self._open:
            self._open[state][request] = kept
        kept.change(state=state, **fields)

    def forget(self, kept: KeptCommand) -> None:
        """Remove a command."""
        self.drop_payload(kept)
        self.drop_result(kept)
        request, queue_id = kept.command.request_id, kept.command.queue_id
        del self._all[request]
        del self._by_queue[queue_id][request]
        if not self._by_queue[queue_id]:
            del self._by_queue[queue_id]
        for known in (*self._open.values(), self.cancelled):
            known.pop(request, None)


E = TypeVar("E", bound=Entry)
Turn = Callable[[], Awaitable[None]]


class MemoryEntries(Entries[E], Generic[E]):
    """Entries by id, oldest first."""

    def __init__(self, kind: type[E], write: Turn, read: Turn) -> None:
        self._kind = kind
        self._write = write
        self._read = read
        self._kept: dict[str, bytes] = {}

    def written_with(self, write: Turn) -> MemoryEntries[E]:
        """The same entries, changed with another `write`."""
        other = MemoryEntries(self._kind, write, self._read)
        other._kept = self._kept
        return other

    async def add(self, entry: E) -> E:
        """`Entries.add`."""
        await self._write()
        if entry.id in self._kept:
            return self._decoded(self._kept[entry.id])
        self._kept[entry.id] = msgspec.json.encode(entry)
        return entry

    async def put(self, entry: E) -> E | None:
        """`Entries.put`."""
        await self._write()
        body = msgspec.json.encode(entry)
        old = self._kept.pop(entry.id, None)
        self._kept[entry.id] = body
        return None if old is None else self._decoded(old)

    async def get(self, entry_id: str) -> E | None:
        """`Entries.get`."""
        await self._read()
        body = self._kept.get(entry_id)
        return None if body is None else self._decoded(body)

    async def change(self, entry_id: str, change: Callable[[E], E]) -> E:
        """`Entries.change`."""
        await self._write()
        if entry_id not in self._kept:
            raise UnknownEntryError(f"there is no {self._kind.kind} {entry_id!r:.200}")
        new = change(self._decoded(self._kept[entry_id]))
        assert new.id == entry_id, "an entry keeps its id"
        self._kept[entry_id] = msgspec.json.encode(new)
        return new

    async def remove(self, entry_id: str, *, due_before: float | None = None) -> bool:
        """`Entries.remove`."""
        await self._write()
        if due_before is not None and entry_id in self._kept:
            due_at = self._decoded(self._kept[entry_id]).due_at
            if due_at is None or due_at >= due_before:
                return False
        return self.drop(entry_id)

    async def all(self, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        """`Entries.all`."""
        await self._read()
        return self.kept()[offset : offset + limit]

    async def of_tenant(
        self, tenant_id: TenantId, *, limit: int = PAGE, offset: int = 0
    ) -> list[E]:
        """`Entries.of_tenant`."""
        await self._read()
        found = [entry for entry in self.kept() if entry.tenant_id == tenant_id]
        return found[offset : offset + limit]

    async def of_parent(self, parent_id: str, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        """`Entries.of_parent`."""
        await self._read()
        found = [entry for entry in self.kept() if entry.parent_id == parent_id]
        return found[offset : offset + limit]

    async def due(
        self,
        before: float,
        *,
        since: float = 0.0,
        tenant_id: TenantId | None = None,
        limit: int = PAGE,
    ) -> list[E]:
        """`Entries.due`."""
        await self._read()
        found = [
            (entry.due_at, entry)
            for entry in reversed(self.kept())
            if entry.due_at is not None
            and since <= entry.due_at < before
            and tenant_id in (None, entry.tenant_id)
        ]
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])][:limit]

    async def count(self, *, tenant_id: TenantId | None = None) -> int:
        """`Entries.count`."""
        await self._read()
        return sum(tenant_id in (None, entry.tenant_id) for entry in self.kept())

    def kept(self) -> list[E]:
        """All of them, newest first."""
        return [self._decoded(body) for body in reversed(self._kept.values())]

    def drop(self, entry_id: str) -> bool:
        """Forget one; whether there was one."""
        return self._kept.pop(entry_id, None) is not None

    def drop_due(self, before: float) -> int:
        """Forget those that were due before a time; returns how many."""
        due = [e for e in self.kept() if e.due_at is not None and e.due_at < before]
        return sum(self.drop(entry.id) for entry in due)

    def _decoded(self, body: bytes) -> E:
        # Kept as bytes, so that nobody holds what another may change.
        return msgspec.json.decode(body, type=self._kind)
