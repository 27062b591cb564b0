"""Fetches the models that a service needs and does not have yet, and reports progress.

A terminal shows a progress bar, a log gets a line every few seconds, and `/readyz` has the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tinsmith.engine.files.cache import cache_of
from tinsmith.engine.registry import ModelSource, find_models
from tinsmith.observe.terminal import Progress, is_seen, size_text
from tinsmith.service.run.service_settings import ServiceSettings, default_data

_log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0

T = TypeVar("T")


async def fetched_models(
    settings: ServiceSettings, tell: Callable[[str], None]
) -> list[ModelSource]:
    """The models that the settings name, with their folders; the fake engine needs none.

    Args:
        settings: The models, and the data folder, where fetched ones are stored.
        tell: Called with the progress, in words, from any thread.

    Raises:
        BaseModelError: A model cannot be fetched.
    """
    sources = settings.served_models
    if settings.engine == "fake":
        return sources
    names = ", ".join(source.name for source in sources)
    with Progress(_short(names), None, in_bytes=True) as bar:
        report = _Report(names, bar, tell)
        cache = cache_of(settings.data, default_data(os.environ))
        return await _on_daemon(lambda: find_models(sources, cache, report.take))


@contextlib.contextmanager
def loading(
    models: list[ModelSource], settings: ServiceSettings, tell: Callable[[str], None]
) -> Iterator[None]:
    """Report that the models are being loaded, which takes seconds, while the block runs."""
    names = ", ".join(model.name for model in models)
    tell(f"loading {names}")
    if settings.engine == "fake":
        yield
        return
    with Progress(f"{_short(names)}: loading", None):
        yield


def _short(names: str) -> str:
    """The names without their organisations, to leave room for the bar."""
    return ", ".join(name.rpartition("/")[2] for name in names.split(", "))


class _Report:
    """Passes on the progress of a model."""

    def __init__(self, names: str, bar: Progress, tell: Callable[[str], None]) -> None:
        self._bar = bar
        self._names = names
        self._tell = tell
        self._logged_at = float("-inf")
        self._is_seen = is_seen()

    def take(self, what: str, done: int, total: int | None) -> None:
        """As `engine.files.base.ReportProgress`."""
        label = f"{_short(self._names)}: {what}"
        if self._bar.label != label:
            self._bar.label = label
            self._bar.begin(total, done)
            self._logged_at = float("-inf")
        else:
            self._bar.add(done - self._bar.done)
        text = f"{self._names}: {what}"
        text = f"{text}, {size_text(done)}" if done or total else text
        text = f"{text} of {size_text(total)}" if total else text
        self._tell(text)
        if not self._is_seen and time.monotonic() - self._logged_at >= TOLD_EVERY_S:
            self._logged_at = time.monotonic()
            _log.info("%s", text)


async def _on_daemon(work: Callable[[], T]) -> T:
    """Run long work on a daemon thread, which does not keep the interpreter from exiting.

    After Ctrl-C a download is abandoned, and the next start resumes it.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]  # None only if the work gives it

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            error = exc
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            _log.debug("the models were fetched after the service had ended")

    threading.Thread(target=run, name="tinsmith-models", daemon=True).start()
    return await ended
