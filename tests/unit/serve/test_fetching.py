"""What is told while models are fetched, and that nobody waits for it in vain."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tinsmith.engines.registry import ModelSource
from tinsmith.errors import BaseModelUnavailableError
from tinsmith.model_files.base import Tell
from tinsmith.model_files.cache import ModelCache
from tinsmith.serve import fetching
from tinsmith.serve.fetching import fetched_models
from tinsmith.serve.settings import ServiceSettings


def test_the_fake_engine_needs_no_files(tmp_path: Path) -> None:
    settings = ServiceSettings(data=tmp_path, engine="fake", models=("nobody/nothing",))

    found = asyncio.run(fetched_models(settings, lambda _: None))

    assert found == [ModelSource("nobody/nothing", "nobody/nothing")]


def test_a_folder_is_found_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = ServiceSettings(data=tmp_path / "data", models=(f"a={tmp_path}",))

    [found] = asyncio.run(fetched_models(settings, lambda _: None))

    assert found.folder == str(tmp_path)


def test_how_far_a_download_is_is_told_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fetch(
        sources: Sequence[ModelSource], cache: ModelCache, tell: Tell
    ) -> Sequence[ModelSource]:
        assert cache.folder == tmp_path / "models"
        for done in (0, 1 << 20, 2 << 20):
            tell("downloading", done, 2 << 20)
        tell("checking", 0, None)
        return sources

    monkeypatch.setattr(fetching, "find_models", fetch)
    monkeypatch.setenv("TINSMITH_HOME", str(tmp_path))
    told: list[str] = []
    settings = ServiceSettings(data=tmp_path, models=("a/b",))
    with caplog.at_level(logging.INFO):
        asyncio.run(fetched_models(settings, told.append))

    assert told[1] == "a/b: downloading, 1.0 MB of 2.0 MB"
    assert told[-1] == "a/b: checking"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a/b: downloading, 0 B of 2.0 MB", "a/b: checking"]


def test_an_error_of_the_download_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BaseModelUnavailableError("there is no network")

    monkeypatch.setattr(fetching, "find_models", fail)
    settings = ServiceSettings(data=tmp_path, models=("a/b",))

    with pytest.raises(BaseModelUnavailableError, match="no network"):
        asyncio.run(fetched_models(settings, lambda _: None))


def test_a_start_that_is_given_up_does_not_wait_for_the_download(
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

    monkeypatch.setattr(fetching, "find_models", hang)
    try:
        asyncio.run(give_up())
        assert begun.is_set() and not may_end.is_set()
    finally:
        may_end.set()
