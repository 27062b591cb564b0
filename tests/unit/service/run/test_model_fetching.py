"""What is told while models are fetched, and that nobody waits for it in vain."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tinsmith.engine.files.base import ReportProgress
from tinsmith.engine.files.cache import ModelCache
from tinsmith.engine.registry import ModelSource
from tinsmith.errors import BaseModelUnavailableError
from tinsmith.service.run import model_fetching
from tinsmith.service.run.model_fetching import fetched_models
from tinsmith.service.run.service_settings import ServiceSettings


def test_the_fake_engine_needs_no_files(tmp_path: Path) -> None:
    settings = ServiceSettings(data=tmp_path, engine="fake", models=("nobody/nothing",))

    found = asyncio.run(fetched_models(settings, lambda _: None))

    assert found == [ModelSource("nobody/nothing", "nobody/nothing")]


def test_a_model_folder_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = ServiceSettings(data=tmp_path / "data", models=(f"a={tmp_path}",))

    [found] = asyncio.run(fetched_models(settings, lambda _: None))

    assert found.folder == str(tmp_path)


def test_download_progress_is_reported_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fetch(
        sources: Sequence[ModelSource], cache: ModelCache, report: ReportProgress
    ) -> Sequence[ModelSource]:
        assert cache.folder == tmp_path / "models"
        for done in (0, 1 << 20, 2 << 20):
            report("downloading", done, 2 << 20)
        report("checking", 0, None)
        return sources

    monkeypatch.setattr(model_fetching, "find_models", fetch)
    monkeypatch.setenv("TINSMITH_HOME", str(tmp_path))
    told: list[str] = []
    settings = ServiceSettings(data=tmp_path, models=("a/b",))
    with caplog.at_level(logging.INFO):
        asyncio.run(fetched_models(settings, told.append))

    assert told[1] == "a/b: downloading, 1.0 MB of 2.0 MB"
    assert told[-1] == "a/b: checking"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a/b: downloading, 0 B of 2.0 MB", "a/b: checking"]


def test_a_download_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BaseModelUnavailableError("there is no network")

    monkeypatch.setattr(model_fetching, "find_models", fail)
    settings = ServiceSettings(data=tmp_path, models=("a/b",))

    with pytest.raises(BaseModelUnavailableError, match="no network"):
        asyncio.run(fetched_models(settings, lambda _: None))


def test_a_cancelled_start_does_not_wait_for_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends while the thread still runs."""
    begun, may_end = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        may_end.wait()

    async def give_up() -> None:
        settings = ServiceSettings(data=tmp_path, models=("a/b",))
        starting = asyncio.create_task(fetched_models(settings, lambda _: None))
        await asyncio.to_thread(begun.wait)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    monkeypatch.setattr(model_fetching, "find_models", hang)
    try:
        asyncio.run(give_up())
        assert begun.is_set() and not may_end.is_set()
    finally:
        may_end.set()
