"""A thread with an event loop on which a service runs from `start` to `stop`.

Knows nothing of the service but how to open and close it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

CLOSE_TIMEOUT_S = 30.0
Step = Callable[[], Awaitable[None]]


class ServiceThread:
    """Runs one service; `start` and `stop` return when that is done."""

    def __init__(self, open_service: Step, close_service: Step) -> None:
        self._open_service = open_service
        self._close_service = close_service
        self._is_open = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        # A daemon: a test that dies before `stop` must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._main, name="tinsmith-testing", daemon=True)

    def start(self) -> None:
        """Begin, and wait until the service is open; raises what kept it from opening."""
        self._thread.start()
        self._is_open.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Close the service and wait for the thread to end."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the test service did not close within {CLOSE_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
            self._error = exc
        finally:
            self._is_open.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        await self._open_service()
        self._is_open.set()
        await self._stopping.wait()
        await self._close_service()
