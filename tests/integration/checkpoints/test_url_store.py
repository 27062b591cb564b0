"""What a store at a URL meets: another side that fails, a small disk for what was fetched."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.checkpoints.url_store import UrlStore
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointUnavailableError,
    StorageFullError,
    ValidationError,
)

FILE = "adapter_model.safetensors"


def path(name: str) -> CheckpointPath:
    return CheckpointPath("run", "weights", name)


class ForeignError(Exception):
    """As libraries raise that fsspec's file systems stand on."""


class Fragile(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory that stops to answer after a number of calls."""

    protocol = "fragile"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    calls_left = 10**9

    @classmethod
    def call(cls) -> None:
        cls.calls_left -= 1
        if cls.calls_left < 0:
            raise ForeignError("no answer")

    def cat_file(
        self,
        path: str,
        version_id: None = None,  # in this place in s3fs
        start: int | None = None,
        end: int | None = None,
    ) -> Any:
        assert version_id is None
        self.call()
        return super().cat_file(path, start=start, end=end)

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self.call()
        return super().put_file(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self.call()
        return super().pipe_file(*args, **kwargs)

    def rm_file(self, *args: Any, **kwargs: Any) -> Any:
        self.call()
        return super().rm_file(*args, **kwargs)


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[UrlStore]:
    fsspec.register_implementation("fragile", Fragile, clobber=True)
    Fragile.store.clear()
    Fragile.pseudo_dirs[:] = [""]
    yield UrlStore("fragile://bucket/folder", tmp_path / "work", grace_s=0.0)
    Fragile.calls_left = 10**9


def save(store: UrlStore, name: str = "a", content: bytes = b"x" * 100) -> None:
    with store.begin(path(name)) as staging:
        (staging.folder / FILE).write_bytes(content)
        (staging.folder / "adapter_config.json").write_bytes(content)
        staging.commit(overwrite=True)


def content(store: UrlStore, name: str = "a") -> bytes:
    with store.open(path(name)) as reading:
        return (reading.folder / FILE).read_bytes()


def test_a_remote_failure_at_any_call_leaves_the_old_checkpoint(fragile: UrlStore) -> None:
    save(fragile, content=b"old")
    refused = 0
    for calls in range(10):
        Fragile.calls_left = calls
        told = ""
        try:
            save(fragile, content=b"new")
        except CheckpointUnavailableError as error:
            told = str(error)
        Fragile.calls_left = 10**9
        fragile.sweep()
        # Two files of one version, and its manifest.
        assert len([name for name in Fragile.store if "/runs/" in name]) == 3
        if not told:
            break
        refused += 1
        assert "ForeignError: no answer" in told
        assert content(fragile) == b"old"

    assert refused == 4  # the manifest is read, two files and the manifest are written
    assert content(fragile) == b"new"


def test_an_unreachable_store_makes_checkpoints_unavailable(fragile: UrlStore) -> None:
    save(fragile)
    Fragile.calls_left = 0

    for use in (fragile.open, fragile.info, fragile.delete, fragile.open_whole, fragile.exists):
        with pytest.raises(CheckpointUnavailableError, match="no answer"):
            use(path("a"))
    with pytest.raises(CheckpointUnavailableError, match="no answer"):
        fragile.read(path("a"), FILE)


def test_a_fetched_checkpoint_is_not_fetched_again(fragile: UrlStore) -> None:
    save(fragile)
    assert content(fragile) == b"x" * 100
    Fragile.calls_left = 1  # for the manifest, which says whether it is still the same

    assert content(fragile) == b"x" * 100


def test_many_concurrent_fetches_of_one_checkpoint_all_succeed(fragile: UrlStore) -> None:
    save(fragile)
    barrier = threading.Barrier(6)

    def fetch(_: int) -> bytes:
        barrier.wait()
        return content(fragile)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(fetch, range(6))) == {b"x" * 100}
    assert fragile.sweep() == 0


def test_a_full_cache_disk_is_reported_instead_of_fetching_forever(
    fragile: UrlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(fragile)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "rename", refuse)

    with pytest.raises(StorageFullError, match="no room"):
        fragile.open(path("a"))


def test_the_cache_of_fetched_checkpoints_stays_within_its_limit(tmp_path: Path) -> None:
    """The one that was not used for longest goes, and never one that is being read."""
    store = UrlStore(f"memory://{tmp_path}", tmp_path / "work", cache_bytes=500)
    for name in "abc":
        save(store, name)
    held = store.open(path("a"))
    old = time.time() - 1000
    os.utime(held.folder, (old, old))
    content(store, "b")
    store.open(path("c")).close()

    fetched = {folder.name for folder in (tmp_path / "work" / "fetched").iterdir()}

    assert fetched == {store.info(path(name)).version for name in "ac"}
    assert (held.folder / FILE).read_bytes() == b"x" * 100
    held.close()
    content(store, "b")
    assert not held.folder.exists()


def test_damage_in_transit_is_detected_and_not_cached(fragile: UrlStore, tmp_path: Path) -> None:
    save(fragile)
    address = fragile.address(path("a"), fragile.info(path("a")).version, FILE)
    good = Fragile().cat_file(address)
    Fragile().pipe_file(address, b"y" * 100)
    with pytest.raises(CheckpointDamagedError, match="has changed since it was written"):
        fragile.open(path("a"))

    Fragile().pipe_file(address, good)

    assert content(fragile) == good
    Fragile().pipe_file(address, b"y" * 100)
    assert content(fragile) == good  # what was fetched
    elsewhere = UrlStore(fragile.url, tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamagedError):
        elsewhere.open(path("a"))
    Fragile().rm_file(address)
    with pytest.raises(CheckpointDamagedError, match="is missing"):
        elsewhere.open(path("a"))


def test_an_old_version_can_be_read_for_an_hour(tmp_path: Path) -> None:
    store = UrlStore(f"memory://{tmp_path}", tmp_path / "work")
    save(store, content=b"old")
    old = store.address(path("a"), store.info(path("a")).version, FILE)
    pieces = store.read(path("a"), FILE)
    save(store, content=b"new")

    assert store.sweep() == 0
    assert b"".join(pieces) == b"old"
    (note,) = (tmp_path / "work" / "staging").iterdir()
    past = time.time() - 3601
    os.utime(note, (past, past))
    assert store.sweep() == 1

    assert not MemoryFileSystem().exists(old)
    assert b"".join(store.read(path("a"), FILE)) == b"new"


def test_large_files_are_read_in_pieces(tmp_path: Path) -> None:
    store = UrlStore(f"memory://{tmp_path}", tmp_path / "work")
    large = os.urandom(10 << 20)
    save(store, content=large)

    pieces = list(store.read(path("a"), FILE, 7, (9 << 20) + 5))

    assert b"".join(pieces) == large[7 : (9 << 20) + 5]
    assert max(map(len, pieces)) <= 1 << 20


def test_open_store_chooses_the_store_by_its_url(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path / "a"), FolderStore)
    opened = open_store(f"file://{tmp_path}/with%20space")
    assert isinstance(opened, FolderStore)
    assert opened.root == tmp_path / "with space"
    assert isinstance(open_store("memory://x", work=tmp_path / "work"), UrlStore)
    with pytest.raises(ValidationError, match="needs a local folder"):
        open_store("memory://x")
    with pytest.raises(ValidationError, match="cannot be used for checkpoints"):
        open_store("nonsense://x", work=tmp_path / "work")
