"""Commands in memory, found by request id, by line and by state."""

from __future__ import annotations

from typing import Any

import msgspec

from tinsmith.errors import UnknownEntryError
from tinsmith.ledger.records import Command, CommandState, LineId


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
        self._by_line: dict[LineId, dict[str, KeptCommand]] = {}
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
        self._by_line.setdefault(command.line, {})[request] = kept
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

    def of_line(self, line: LineId) -> list[KeptCommand]:
        """Those of one line."""
        return list(self._by_line.get(line, {}).values())

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
        request, line = kept.command.request_id, kept.command.line
        del self._all[request]
        del self._by_line[line][request]
        if not self._by_line[line]:
            del self._by_line[line]
        for known in (*self._open.values(), self.cancelled):
            known.pop(request, None)
