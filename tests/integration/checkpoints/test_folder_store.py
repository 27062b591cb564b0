"""What a store in a folder meets: other threads and processes, damage, limits of the disk."""

from __future__ import annotations

import errno
import fcntl
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.checkpoints.test_crashes import ENVIRONMENT
from tinsmith.checkpoints import folder_store
from tinsmith.checkpoints import manifest as manifests
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.manifest import MANIFEST
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CheckpointUnavailableError,
)

PATH = CheckpointPath.parse("tinker://run/weights/a")
FILES = ("one", "two", "three")


def save(store: FolderStore, content: str = "x", path: CheckpointPath = PATH) -> None:
    with store.begin(path) as staging:
        for name in FILES:
            (staging.folder / name).write_text(content)
        staging.commit(overwrite=True)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def test_concurrent_readers_see_only_complete_checkpoints(store: FolderStore) -> None:
    """Three readers open and read while the checkpoint is overwritten and deleted over and over."""
    save(store, "0")
    is_over = threading.Event()

    def read() -> set[str]:
        seen = set()
        while not is_over.is_set():
            try:
                reading = store.open(PATH)
            except CheckpointNotFoundError:
                continue
            with reading:
                contents = {(reading.folder / name).read_text() for name in FILES}
            assert len(contents) == 1
            seen |= contents
        return seen

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for number in range(1, 60):
                if number % 7 == 0:
                    store.delete(PATH)
                save(store, str(number))
                if number % 5 == 0:
                    store.sweep()
        finally:
            is_over.set()
        seen = set().union(*(reader.result() for reader in readers))

    assert len(seen) > 1
    store.sweep()
    place = store.place(PATH)
    assert {entry.name for entry in place.iterdir()} == {MANIFEST, store.info(PATH).version}


def test_only_one_of_many_concurrent_saves_of_a_name_succeeds(store: FolderStore) -> None:
    barrier = threading.Barrier(8)

    def try_save(number: int) -> bool:
        with store.begin(PATH, origin=str(number)) as staging:
            for name in FILES:
                (staging.folder / name).write_text(str(number))
            barrier.wait()
            try:
                staging.commit()
            except CheckpointExistsError:
                return False
            return True

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(try_save, range(8)))

    assert outcomes.count(True) == 1
    with store.open(PATH) as reading:
        contents = {(reading.folder / name).read_text() for name in FILES}
    assert contents == {str(outcomes.index(True))}


def test_another_process_does_not_delete_a_checkpoint_that_is_being_read(
    store: FolderStore,
) -> None:
    save(store)
    program = """
import pathlib, sys
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath
store = FolderStore(pathlib.Path(sys.argv[1]))
assert store.delete(CheckpointPath.parse(sys.argv[2]))
print(store.sweep())
"""
    command = [sys.executable, "-c", program, str(store.root), str(PATH)]
    with store.open(PATH) as reading:
        done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)

        assert done.stdout == b"0\n"
        assert (reading.folder / "one").read_text() == "x"
    assert store.sweep() == 1
    assert not store.place(PATH).exists()


def test_a_process_that_was_paused_with_the_lock_does_not_hang_others(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_store, "LOCK_WAIT_S", 0.1)
    save(store, "old")
    with store.locked():  # as the paused one does
        with pytest.raises(CheckpointUnavailableError, match="/lock locked for") as failed:
            store.delete(PATH)
        assert failed.value.reason == "another process keeps it locked"
        with store.open(PATH) as reading:
            assert (reading.folder / "one").read_text() == "old"

    assert store.delete(PATH)


def test_a_damaged_checkpoint_is_distinguished_from_a_missing_one(store: FolderStore) -> None:
    save(store, "good")
    folder = store.place(PATH) / store.info(PATH).version

    (folder / "two").write_text("evil")  # of the same size
    with pytest.raises(CheckpointDamagedError, match="file two has changed"):
        store.open_whole(PATH).close()
    (folder / "two").write_text("too long")
    with pytest.raises(CheckpointDamagedError, match="two has 8 bytes; 4 were written"):
        store.open(PATH)
    (folder / "two").unlink()
    with pytest.raises(CheckpointDamagedError, match="two has None bytes"):
        store.open(PATH)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointDamagedError, match=r"the files of .* are missing"):
        store.open(PATH)

    assert store.delete(PATH)
    assert not store.exists(PATH)


def test_a_damaged_manifest_can_be_overwritten_and_deleted(store: FolderStore) -> None:
    save(store)
    (store.place(PATH) / MANIFEST).write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointDamagedError, match="cannot read"):
        store.open(PATH)

    save(store, "new")

    store.open_whole(PATH).close()
    (store.place(PATH) / MANIFEST).write_bytes(b"")
    assert store.delete(PATH)
    store.sweep()
    assert not store.place(PATH).exists()


def test_a_checkpoint_of_a_newer_format_version_is_rejected_and_kept(store: FolderStore) -> None:
    save(store)
    file = store.place(PATH) / MANIFEST
    newer = file.read_text().replace('"format_version": 1', '"format_version": 2')
    file.write_text(newer)

    for use in (store.open, store.info, store.delete, lambda _: save(store)):
        with pytest.raises(CheckpointFormatError, match="format 2"):
            use(PATH)
    store.sweep()
    assert file.read_text() == newer


def test_names_that_differ_only_in_case_are_not_confused(store: FolderStore) -> None:
    """As on a disk that ignores case: both names lead to one folder."""
    upper = CheckpointPath("run", "weights", "A")
    save(store, "lower")
    store.place(upper).symlink_to(store.place(PATH))

    assert not store.exists(upper)
    assert not store.delete(upper)
    with pytest.raises(CheckpointExistsError, match="differs only in case"):
        save(store, "upper", upper)
    store.sweep()
    assert store.exists(PATH)
    store.open_whole(PATH).close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.integers(0, 600), st.binary(max_size=5)),
    )
)
def test_any_manifest_is_read_or_rejected(
    store: FolderStore, damage: bytes | tuple[int, bytes]
) -> None:
    """Bytes of any kind, and good manifests with a few bytes changed."""
    if not store.place(PATH).exists():
        save(store)
        (store.root / "good").write_bytes((store.place(PATH) / MANIFEST).read_bytes())
    good = (store.root / "good").read_bytes()
    if isinstance(damage, bytes):
        content = damage
    else:
        start, new = damage
        content = good[:start] + new + good[start + len(new) :]
    (store.place(PATH) / MANIFEST).write_bytes(content)

    try:
        with store.open(PATH) as reading:
            assert reading.folder.parent == store.place(PATH)
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"name": "one"', '"name": "../../../../../lock"'),
        ('"name": "one"', '"name": "checkpoint.json"'),
        ('"name": "two"', '"name": "three"'),
        ('"size_bytes": 1', '"size_bytes": -1'),
        ('"version": "', '"version": "../'),
        ('"sha256": "', '"sha256": "zz'),
    ],
)
def test_manifests_that_point_outside_the_store_are_rejected(
    store: FolderStore, old: str, new: str
) -> None:
    save(store)
    file = store.place(PATH) / MANIFEST
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))

    with pytest.raises(CheckpointDamagedError):
        store.open(PATH)


def test_a_file_size_limit_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    """With the limit that the system has for it, in a process of its own."""
    program = """
import pathlib, resource, sys
import numpy as np
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.format import StoredAdapter, LoraPair, write_adapter
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import StorageFullError
path = CheckpointPath.parse("tinker://run/weights/a")
store = FolderStore(pathlib.Path(sys.argv[1]))
pair = LoraPair(np.ones((4, 5000), "f4"), np.ones((5000, 4), "f4"))
adapter = StoredAdapter(base_model="m", rank=4, alpha=1.0, layers={"q_proj": pair})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    with store.begin(path) as staging:
        write_adapter(staging.folder, adapter)
    raise AssertionError("it was written")
except StorageFullError as error:
    assert "free" in str(error)
assert not store.exists(path)
assert not any((store.root / "staging").iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with store.begin(path) as staging:
    write_adapter(staging.folder, adapter)
    staging.commit()
store.open_whole(path).close()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "store")]

    done = subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_an_unmounted_disk_makes_checkpoints_unavailable_not_missing(store: FolderStore) -> None:
    """An empty folder is left where it was mounted, or none. It is as it was once it is back."""
    save(store)
    away = store.root.with_name("away")
    store.root.rename(away)

    for make in (Path.mkdir, Path.rmdir):
        make(store.root)
        for use in (store.info, store.open, store.delete, store.begin):
            with pytest.raises(CheckpointUnavailableError, match="disk is mounted"):
                use(PATH)
    away.rename(store.root)

    with store.open_whole(PATH) as reading:
        assert reading.manifest.files
    with pytest.raises(CheckpointNotFoundError):
        store.info(CheckpointPath.parse("tinker://run/weights/other"))


def test_a_folder_without_a_store_is_rejected_if_one_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnavailableError, match="its disk is mounted") as refused:
        FolderStore(tmp_path, must_exist=True)

    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lock").touch()
    assert str(tmp_path / "lock") in str(refused.value)
    save(FolderStore(tmp_path, must_exist=True))


def test_an_impossible_root_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CheckpointUnavailableError, match="cannot store checkpoints in"):
        FolderStore(tmp_path / "file" / "store")


def test_a_disk_without_locks_is_rejected_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "as NFS says")

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(CheckpointUnavailableError, match="choose a folder on a local disk"):
        FolderStore(tmp_path / "store")


def test_copies_are_hard_links(store: FolderStore) -> None:
    save(store)
    other = CheckpointPath.parse("tinker://other/weights/a")

    store.copy(PATH, other)

    for name in FILES:
        one = store.place(PATH) / store.info(PATH).version / name
        two = store.place(other) / store.info(other).version / name
        assert one.samefile(two)


def test_files_are_copied_where_hard_links_are_unavailable(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no links here")

    save(store, "content")
    other = CheckpointPath.parse("tinker://other/weights/a")
    monkeypatch.setattr(Path, "hardlink_to", refuse)

    store.copy(PATH, other)

    assert b"".join(store.read(other, "one")) == b"content"


def test_manifests_stay_small(store: FolderStore) -> None:
    """The largest that can be written can be read again."""
    with store.begin(PATH) as staging:
        for number in range(manifests.FILES_MAX):
            (staging.folder / f"{number:0100}").touch()
        written = staging.commit()

    assert store.info(PATH) == written
    assert len(written.encode()) < manifests.MANIFEST_BYTES_MAX
