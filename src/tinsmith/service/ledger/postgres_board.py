"""The board of several servers over one PostgreSQL database: published by NOTIFY.

Each server has the board of a single process, `MemoryBoard`, and applies to it what the server with
the scheduler sends. Messages are JSON, one per line of a notice, on two kinds of channels:

| channel | messages |
|---|---|
| that of all servers | reports and queue states of the scheduler; who streams what; doubts |
| that of one server | tokens of the samples that its clients stream |

PostgreSQL delivers notices in order, and to everyone who is connected. A server that was not asks
for everything again (`Hello`), and the scheduler asks the others what they stream when it starts
(`Started`). Tokens are numbered, so that a server notices lost ones; its streams then send the rest
with the final result. Messages of a scheduler carry its epoch, and those of an older epoch are
ignored: it may have been paused while another one took over. Unknown messages are ignored too, so
that servers of neighbouring versions understand each other.

Nothing is durable: notices are sent on a connection of their own, with `synchronous_commit` off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.service.ledger.board import ACTIVE, QueueReport, SchedulerReport, TokenPiece
from tinsmith.service.ledger.memory_board import MOST_STREAMS, MemoryBoard

_log = logging.getLogger(__name__)

LONGEST_NOTICE = 7000
"""In bytes; PostgreSQL allows 8,000."""
LONGEST_REASON = 1000
"""In characters, of a problem or of the reason of a pause."""
PIECE_TOKENS = 64
"""Longer pieces are split, so that each fits into a notice."""
MOST_OUTGOING = 20_000
"""Messages that wait to be sent; beyond it they are dropped, as if a connection had been lost."""
REPEAT_S = 10.0
"""How often a server repeats what its clients stream."""
FORGET_S = 35.0
"""When streams of a server that does not repeat them are forgotten."""
RETRY_S = 0.5
FLUSH_S = 1.0
SILENT_S = 5.0
"""When a scheduler that reports every second counts as gone."""
NEVER_HEARD = (
    "no scheduler has reported yet; start one with `tinsmith serve --role scheduler` on this "
    "database"
)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A server has begun to listen, and knows nothing."""

    node: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A scheduler has started: no queue is paused, and it does not know who streams what."""

    node: str
    epoch: int


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The scheduler's report."""

    node: str
    epoch: int
    report: SchedulerReport


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="queues"):
    """Why queues are paused, or that they no longer are; an id of None means all of them."""

    node: str
    epoch: int
    report: QueueReport
    queue_ids: list[str | None]


class Watched(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Clients of a server stream these samples."""

    node: str
    request_ids: list[str]


class Unwatched(msgspec.Struct, frozen=True, array_like=True, tag="unwatch"):
    """Clients of a server no longer stream these samples."""

    node: str
    request_ids: list[str]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Tokens of a sample: the piece with this number of this run of it."""

    request_id: str
    run: str
    number: int
    piece: TokenPiece | None
    """None at the start of a run."""


class Doubted(msgspec.Struct, frozen=True, array_like=True, tag="doubt"):
    """A server had an error from the ledger or the store."""

    node: str
    what: Literal["ledger", "store"]


Message: TypeAlias = Hello | Started | Reported | Paused | Watched | Unwatched | Tokens | Doubted
_decode = msgspec.json.Decoder(Message).decode
_encode = msgspec.json.Encoder().encode


class PostgresBoard(MemoryBoard):
    """The board of one of several servers. For one event loop.

    Args:
        send: Sends notices, each a channel and a text, in one transaction; raises if it cannot.
        channel: The channel of all servers of this ledger.
        clock: Seconds that only run forward.

    Attributes:
        channels: Those whose notices `hear` is to be given.
    """

    def __init__(
        self,
        send: Callable[[Sequence[tuple[str, str]]], Awaitable[object]],
        channel: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._send = send
        self._channel = channel
        self._clock = clock
        self._node = secrets.token_hex(6)
        self.channels = (channel, self._own_channel(self._node))
        self._outgoing: list[tuple[str, bytes]] = []
        self._has_outgoing = asyncio.Event()
        self._sent: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._runs_scheduler = False
        self._heard_epoch = 0
        self._heard_at: float | None = None
        self._watchers: dict[str, dict[str, float]] = {}
        """As the scheduler knows them: servers by sample, with when they said so."""
        self._runs_of: dict[str, tuple[str, int]] = {}
        """The run and the number of pieces of each sample: sent, or received."""
        self._run_count = 0

    def _own_channel(self, node: str) -> str:
        return f"{self._channel}_{node}"

    # Sending

    def follow(self) -> None:
        """`Board.follow`."""
        self._put(self._channel, Hello(self._node))
        self._repeat_watched()

    async def flush(self) -> None:
        """`Board.flush`."""
        if self._sent is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await asyncio.shield(self._sent)

    async def close(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _put(self, channel: str, message: Message) -> None:
        if len(self._outgoing) >= MOST_OUTGOING:
            self._outgoing.clear()
        self._outgoing.append((channel, _encode(message)))
        if self._sent is None:
            self._sent = asyncio.get_running_loop().create_future()
        self._has_outgoing.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep_sending(), name="ledger: board")

    async def _keep_sending(self) -> None:
        repeat_at = self._clock() + REPEAT_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, repeat_at - self._clock())):
                    await self._has_outgoing.wait()
            if self._clock() >= repeat_at:
                repeat_at = self._clock() + REPEAT_S
                self._repeat_watched()
                self._forget_silent()
            messages, self._outgoing = self._outgoing, []
            sent, self._sent = self._sent, None
            self._has_outgoing.clear()
            if not messages:
                continue
            try:
                await self._send(notices(messages))
            except Exception as exc:  # noqa: BLE001 - the board may lose anything, and goes on
                _log.debug("could not publish on the board: %s", exc)
                await asyncio.sleep(RETRY_S)
            if sent is not None and not sent.done():
                sent.set_result(None)

    # Hearing

    def reconnected(self) -> None:
        """Notices may have been missed: ask for everything again."""
        if self._task is not None:
            self.follow()

    def hear(self, text: str) -> None:
        """Apply the messages of a notice."""
        for line in text.split("\n"):
            try:
                message = _decode(line)
            except msgspec.MsgspecError as exc:
                _log.debug("ignoring a message on the board that another version sent: %s", exc)
                continue
            if isinstance(message, Tokens):
                self._take_tokens(message)
            elif message.node != self._node:
                self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, (Started, Reported, Paused)):
            if self._is_current(message.epoch):
                self._take_from_scheduler(message)
        elif isinstance(message, Hello):
            if self._runs_scheduler:
                self._tell_everything()
        elif isinstance(message, Watched):
            self._add_watcher(message)
        elif isinstance(message, Unwatched):
            for request_id in message.request_ids:
                self._remove_watcher(request_id, message.node)
        elif isinstance(message, Doubted):
            if message.what == "ledger":
                super().doubt_ledger()
            else:
                super().doubt_store()

    def _is_current(self, epoch: int) -> bool:
        """Whether this is of the newest scheduler; notes that there is a newer one."""
        if epoch < max(self._heard_epoch, self.epoch if self._runs_scheduler else 0):
            return False
        if epoch > self._heard_epoch:
            self._heard_epoch = epoch
            self._runs_scheduler = False
            self._watchers.clear()
            self._take_back_pauses()
        return True

    def _take_from_scheduler(self, message: Started | Reported | Paused) -> None:
        self._heard_at = self._clock()
        if isinstance(message, Reported):
            super().publish_report(message.report)
        elif isinstance(message, Paused):
            for queue_id in message.queue_ids:
                super().set_queue_state(message.report, queue_id)
        else:
            self._take_back_pauses()
            self._repeat_watched()

    def _take_back_pauses(self) -> None:
        for queue_id in (*self._queues, None):
            super().set_queue_state(ACTIVE, queue_id)

    # The scheduler's report

    def publish_report(self, report: SchedulerReport) -> None:
        """`Board.publish_report`."""
        if self._is_newest():
            super().publish_report(_short(report))
            self._put(self._channel, Reported(self._node, self.epoch, self._report))

    def _is_newest(self) -> bool:
        """Whether this server's scheduler may publish: none with a newer lease was heard of."""
        self._runs_scheduler = self.epoch >= self._heard_epoch
        return self._runs_scheduler

    @property
    def published_report(self) -> SchedulerReport:
        """`Board.published_report`; not ready once the scheduler is not heard of any more."""
        report = super().published_report
        if self._runs_scheduler:
            return report
        if self._heard_at is None:
            return SchedulerReport(problem=NEVER_HEARD)
        silent_s = self._clock() - self._heard_at
        if silent_s > SILENT_S:
            return SchedulerReport(
                problem=f"no scheduler has reported for {silent_s:.0f} s; commands wait for one"
            )
        return report

    def _tell_everything(self) -> None:
        self._put(self._channel, Reported(self._node, self.epoch, self._report))
        paused: dict[QueueReport, list[str | None]] = {}
        if self._all_queues != ACTIVE:
            paused[self._all_queues] = [None]
        for queue_id, report in self._queues.items():
            paused.setdefault(report, []).append(queue_id)
        for report, queue_ids in paused.items():
            for some in _some(queue_ids):
                self._put(self._channel, Paused(self._node, self.epoch, report, some))

    # Doubts

    def doubt_ledger(self) -> None:
        """`Board.doubt_ledger`."""
        super().doubt_ledger()
        self._tell_doubt("ledger")

    def doubt_store(self) -> None:
        """`Board.doubt_store`."""
        super().doubt_store()
        self._tell_doubt("store")

    def _tell_doubt(self, what: Literal["ledger", "store"]) -> None:
        told = _encode(Doubted(self._node, what))
        if (self._channel, told) not in self._outgoing:
            self._put(self._channel, Doubted(self._node, what))

    # Queue states

    def set_queue_state(self, report: QueueReport, queue_id: str | None = None) -> None:
        """`Board.set_queue_state`."""
        if not self._is_newest():
            return
        if report.reason is not None:
            report = msgspec.structs.replace(report, reason=report.reason[:LONGEST_REASON])
        before = self._all_queues if queue_id is None else self._queues.get(queue_id, ACTIVE)
        super().set_queue_state(report, queue_id)
        if report != before:
            self._put(self._channel, Paused(self._node, self.epoch, report, [queue_id]))

    def clear_queue_states(self) -> None:
        """`Board.clear_queue_states`."""
        if self._is_newest():
            self._take_back_pauses()
            self._put(self._channel, Started(self._node, self.epoch))

    # Tokens

    def watch(self, request_id: str) -> bool:
        """`Board.watch`."""
        is_first = request_id not in self._streams
        is_watched = super().watch(request_id)
        if is_watched and is_first:
            self._put(self._channel, Watched(self._node, [request_id]))
        return is_watched

    def unwatch(self, request_id: str) -> None:
        """`Board.unwatch`."""
        super().unwatch(request_id)
        if request_id not in self._streams:
            self._put(self._channel, Unwatched(self._node, [request_id]))
            if request_id not in self._watchers:
                self._runs_of.pop(request_id, None)

    def is_watched(self, request_id: str) -> bool:
        """`Board.is_watched`."""
        return super().is_watched(request_id) or request_id in self._watchers

    def _repeat_watched(self) -> None:
        for some in _some(self._streams):
            self._put(self._channel, Watched(self._node, some))

    def _add_watcher(self, message: Watched) -> None:
        if not self._runs_scheduler:
            return
        now = self._clock()
        for request_id in message.request_ids:
            if request_id in self._watchers or len(self._watchers) < MOST_STREAMS:
                self._watchers.setdefault(request_id, {})[message.node] = now

    def _remove_watcher(self, request_id: str, node: str) -> None:
        nodes = self._watchers.get(request_id)
        if nodes is not None:
            nodes.pop(node, None)
            if not nodes:
                del self._watchers[request_id]
                if request_id not in self._streams:
                    self._runs_of.pop(request_id, None)

    def _forget_silent(self) -> None:
        before = self._clock() - FORGET_S
        silent = [
            (request_id, node)
            for request_id, nodes in self._watchers.items()
            for node, heard_at in nodes.items()
            if heard_at < before
        ]
        for request_id, node in silent:
            self._remove_watcher(request_id, node)

    def restart_tokens(self, request_id: str) -> None:
        """`Board.restart_tokens`."""
        super().restart_tokens(request_id)
        if request_id in self._watchers:
            self._run_count += 1
            run = f"{self.epoch}.{self._run_count}"
            self._runs_of[request_id] = (run, 0)
            self._tell_watchers(Tokens(request_id, run, 0, None))

    def publish_tokens(self, request_id: str, pieces: Sequence[TokenPiece]) -> None:
        """`Board.publish_tokens`."""
        super().publish_tokens(request_id, pieces)
        if request_id not in self._watchers or request_id not in self._runs_of:
            return
        run, number = self._runs_of[request_id]
        for piece in _split(pieces):
            self._tell_watchers(Tokens(request_id, run, number, piece))
            number += 1
        self._runs_of[request_id] = (run, number)

    def _tell_watchers(self, message: Tokens) -> None:
        for node in self._watchers[message.request_id]:
            self._put(self._own_channel(node), message)

    def _take_tokens(self, message: Tokens) -> None:
        request_id = message.request_id
        if request_id not in self._streams:
            return
        if message.piece is None:
            self._runs_of[request_id] = (message.run, 0)
            super().restart_tokens(request_id)
        elif self._runs_of.get(request_id) == (message.run, message.number):
            self._runs_of[request_id] = (message.run, message.number + 1)
            super().publish_tokens(request_id, [message.piece])
        # Otherwise something before it was lost: the rest of this run comes with its result.


def notices(messages: Iterable[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Messages as notices, as many in each as it holds, in the order of each channel."""
    found: list[tuple[str, str]] = []
    gathered: dict[str, tuple[list[bytes], int]] = {}
    for channel, message in messages:
        lines, size = gathered.get(channel, ([], 0))
        if lines and size + len(message) + 1 > LONGEST_NOTICE:
            found.append((channel, b"\n".join(lines).decode()))
            lines, size = [], 0
        lines.append(message)
        gathered[channel] = lines, size + len(message) + 1
    found += [(channel, b"\n".join(lines).decode()) for channel, (lines, _) in gathered.items()]
    return [(channel, text) for channel, text in found if len(text.encode()) <= LONGEST_NOTICE]


def _some(names: Iterable[Any]) -> list[list[Any]]:
    """Names in lists that fit into a notice each."""
    found: list[list[Any]] = []
    size = LONGEST_NOTICE
    for name in names:
        size += len(_encode(name)) + 1
        if size > LONGEST_NOTICE - LONGEST_REASON * 4 - 200:
            found.append([])
            size = 0
        found[-1].append(name)
    return found


def _short(report: SchedulerReport) -> SchedulerReport:
    """The report as JSON can hold it within a notice."""
    problem = None if report.problem is None else report.problem[:LONGEST_REASON]
    figures = {name: value for name, value in report.figures.items() if math.isfinite(value)}
    return msgspec.structs.replace(report, problem=problem, figures=figures)


def _split(pieces: Sequence[TokenPiece]) -> Iterable[TokenPiece]:
    for piece in pieces:
        if len(piece.tokens) <= PIECE_TOKENS:
            yield piece
            continue
        for start in range(0, len(piece.tokens), PIECE_TOKENS):
            end = start + PIECE_TOKENS
            yield TokenPiece(piece.sequence, piece.tokens[start:end], piece.logprobs[start:end])
