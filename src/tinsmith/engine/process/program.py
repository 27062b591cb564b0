"""The program of an engine's process; `connection.py` starts it as `python -m`.

It creates the engine from its specification, runs calls and replies. It exits when the connection
closes, that is, with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from tinsmith.engine.base import Engine, SampleEvent, SampleOutcome, SampleWork
from tinsmith.engine.files.file_digests import check_digest, digest_of
from tinsmith.engine.process import messages
from tinsmith.engine.process.connection import read_body, write_body
from tinsmith.engine.process.encoding import BodyDecoder, BodyEncoder
from tinsmith.engine.process.engine_spec import create_engine
from tinsmith.engine.process.messages import CallReply, EngineCall, ToChild, ToParent
from tinsmith.errors import ValidationError

PARENT_POLL_S = 1.0
"""How often the parent is checked, besides the socket."""
OTHER_VERSION = 3
"""The exit status of a process whose parent has another version of the protocol."""


class EngineProgram:
    """Runs one engine for the process at the other end of a connection. For one event loop.

    Args:
        send: Sends a body to the other end.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._engine: Engine | None = None
        self._refused: list[SampleEvent] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoder = BodyEncoder()
        self._decoder: BodyDecoder[ToChild] = BodyDecoder(ToChild)

    async def run(self, receive: Callable[[], Awaitable[bytes | None]]) -> None:
        """Return when the other end has ended.

        Raises:
            DecodeError: The other end sent something malformed.
            ValidationError: It speaks another version of the protocol.
        """
        loop = asyncio.get_running_loop()
        self._send(messages.hello())
        greeting = await receive()
        if greeting is None:
            return
        messages.check_hello(greeting)
        while (body := await receive()) is not None:
            message = self._decoder.decode(body)
            # All start in a later iteration of the loop, in order.
            if isinstance(message, EngineCall):
                task = loop.create_task(self._reply(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                loop.call_soon(self._run_order, message)

    async def _reply(self, call: EngineCall) -> None:
        try:
            reply = await self._run(call)
        except Exception as exc:  # noqa: BLE001 - sent to the caller
            reply = CallReply(call.number, error=exc)
        if self._engine is not None:
            reply = msgspec.structs.replace(reply, capacity=self._engine.capacity())
        try:
            self.send(reply)
        except Exception as exc:  # noqa: BLE001 - or the caller would wait forever
            self.send(CallReply(call.number, error=exc))

    async def _run(self, call: EngineCall) -> CallReply:
        number = call.number
        match call:
            case messages.OpenEngine():
                return CallReply(number, opened=await self._open(call))
            case messages.CreateAdapter():
                await self.engine.create_adapter(call.spec)
            case messages.LoadAdapter():
                await self._load(call)
            case messages.SaveAdapter():
                return CallReply(number, digest=await self._save(call))
            case messages.DropAdapter():
                await self.engine.drop_adapter(call.adapter_id)
            case messages.Train():
                outcomes = await self.engine.train(messages.received_works(call.works))
                return CallReply(number, outcomes=tuple(map(messages.sent_outcome, outcomes)))
            case messages.LoadWeights():
                await self.engine.load_weights(call.weights_id, call.base_model, Path(call.folder))
            case messages.DropWeights():
                await self.engine.drop_weights(call.weights_id)
            case messages.StepSampler():
                return CallReply(number, events=tuple(await self._step()))
        return CallReply(number)

    async def _open(self, call: messages.OpenEngine) -> messages.EngineOpened:
        _log_to(self, call.log_levels)
        engine = create_engine(call.spec)
        await engine.open()
        self._engine = engine
        models = engine.base_models()
        return messages.EngineOpened(engine.name, engine.samples_concurrently, models)

    async def _load(self, call: messages.LoadAdapter) -> None:
        folder = Path(call.folder)
        if call.digest is not None:
            await asyncio.to_thread(check_digest, folder, call.digest)
        await self.engine.load_adapter(call.spec, folder, messages.parts_of(call.parts))

    async def _save(self, call: messages.SaveAdapter) -> str | None:
        """Save an adapter, and return the digest of its files if it is wanted."""
        folder = Path(call.folder)
        await self.engine.save_adapter(call.adapter_id, folder, messages.parts_of(call.parts))
        return await asyncio.to_thread(digest_of, folder) if call.wants_digest else None

    async def _step(self) -> list[SampleEvent]:
        events = [] if self._refused else await self.engine.step_sampler()
        refused, self._refused = self._refused, []
        return [*events, *refused]

    def _run_order(self, order: messages.EngineOrder) -> None:
        match order:
            case messages.CancelSample():
                self.engine.cancel(order.work_id)
            case messages.AdmitSample():
                self._admit(order.sample)

    def _admit(self, sample: SampleWork) -> None:
        try:
            self.engine.admit(sample)
        except Exception as exc:  # noqa: BLE001 - this sample fails alone
            self._refused.append(SampleOutcome(work_id=sample.work_id, error=exc))

    @property
    def engine(self) -> Engine:
        """The opened engine."""
        assert self._engine is not None
        return self._engine

    def send(self, message: ToParent) -> None:
        """Send a message to the parent; for the event loop."""
        self._send(self._encoder.encode(message))


class _ParentHandler(logging.Handler):
    """Sends log records to the parent, from any thread."""

    def __init__(self, child: EngineProgram, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._child = child
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; at exit there is nobody to send it to."""
        try:
            self._loop.call_soon_threadsafe(self._child.send, messages.log_line(record))
        except RuntimeError:
            self.handleError(record)


def _log_to(child: EngineProgram, levels: dict[str, int]) -> None:
    logging.getLogger().handlers[:] = [_ParentHandler(child, asyncio.get_running_loop())]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)


def _end_with(parent: int) -> None:
    """Exit when the parent has exited.

    The socket closes at once, unless a fork of the parent still holds the other end. The system's
    signal for this (PR_SET_PDEATHSIG) follows the thread that started us, which may end before its
    process.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve the parent over the inherited socket."""
    faulthandler.enable()  # prints the stack of a crash to stderr
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with socket.socket(fileno=descriptor) as connection:
        asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    program = EngineProgram(lambda body: write_body(writer, body))
    status = 0
    try:
        await program.run(lambda: read_body(reader))
    except ValidationError as exc:
        await writer.drain()  # our hello, from which the parent sees it too
        sys.stderr.write(f"{exc}\n")
        status = OTHER_VERSION
    os._exit(status)  # without waiting for computing threads


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
