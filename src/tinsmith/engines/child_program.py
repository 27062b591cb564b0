"""The program of an engine's own process; `child.py` starts it as `python -m`.

It makes the engine, does what it is told and answers. It ends with its parent, however that ends:
the socket is closed then, whatever runs here.
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
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.engines.base import Engine, SampleEvent, SampleOutcome, SampleWork, TrainingOutcome
from tinsmith.engines.child_messages import (
    Answer,
    Call,
    Opened,
    Order,
    log_line,
    packed,
    portable,
    receive,
)

LOOK_S = 1.0
"""How often it is looked whether the parent still lives, beside the socket."""


class _Child:
    """Runs one engine for the process at the other end of a socket."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._refused: list[SampleEvent] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, connection: socket.socket) -> None:
        """Return when the parent has gone."""
        loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        while (message := await receive(reader)) is not None:
            # Each begins at a later turn of the loop, in the order in which they came.
            if isinstance(message, Call):
                task = loop.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                loop.call_soon(self._obey, message)

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._run(call))
        except Exception as exc:  # noqa: BLE001 - it is the caller's
            answer = Answer(call.number, error=portable(exc))
        if self._engine is not None:
            answer = answer._replace(capacity=self._engine.capacity())
        try:
            self.send(answer)
        except Exception as exc:  # noqa: BLE001 - a result that cannot travel must not be waited for
            self.send(Answer(call.number, error=portable(exc)))

    async def _run(self, call: Call) -> Any:
        if call.method == "open":
            return await self._open(*call.arguments)
        if call.method == "step_sampler":
            return await self._step()
        result = await getattr(self.engine, call.method)(*call.arguments)
        return [_travelling(one) for one in result] if call.method == "train" else result

    async def _open(self, make: Callable[[], Engine], levels: dict[str, int]) -> Opened:
        _log_to(self, levels)
        engine = make()
        await engine.open()
        self._engine = engine
        return Opened(engine.name, engine.samples_apart, engine.base_models())

    async def _step(self) -> list[SampleEvent]:
        if not self._refused:
            events = [_travelling(event) for event in await self.engine.step_sampler()]
        else:
            events = []
        refused, self._refused = self._refused, []
        return events + refused

    def _obey(self, order: Order) -> None:
        if order.method == "cancel":
            self.engine.cancel(*order.arguments)
            return
        sample: SampleWork = order.arguments[0]
        try:
            self.engine.admit(sample)
        except Exception as exc:  # noqa: BLE001 - it is this sample's outcome and no other's
            self._refused.append(SampleOutcome(work_id=sample.work_id, error=portable(exc)))

    @property
    def engine(self) -> Engine:
        """Once it is open."""
        assert self._engine is not None
        return self._engine

    def send(self, message: object) -> None:
        """Send something to the parent, on the event loop."""
        assert self._writer is not None
        self._writer.write(packed(message))


def _travelling(outcome: Any) -> Any:
    if isinstance(outcome, TrainingOutcome | SampleOutcome) and outcome.error is not None:
        return msgspec.structs.replace(outcome, error=portable(outcome.error))
    return outcome


class _ToParent(logging.Handler):
    """Sends lines to the parent, from any thread."""

    def __init__(self, child: _Child, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._child = child
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line; on the way out of the process there is nobody to send it to."""
        try:
            self._loop.call_soon_threadsafe(self._child.send, log_line(record))
        except RuntimeError:
            self.handleError(record)


def _log_to(child: _Child, levels: dict[str, int]) -> None:
    logging.getLogger().handlers[:] = [_ToParent(child, asyncio.get_running_loop())]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended.

    The socket tells it at once, unless a fork of the parent still holds the other end. The
    system's own signal for it (PR_SET_PDEATHSIG) is about the thread that started us, which may
    well end before its process.
    """
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve the parent over the socket that it passed on."""
    faulthandler.enable()  # a crash in a library shows where it was, on stderr
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with socket.socket(fileno=descriptor) as connection:
        asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    await _Child().run(connection)
    os._exit(0)  # without a wait for what threads compute: nobody wants it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
