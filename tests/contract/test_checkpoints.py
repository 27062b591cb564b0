"""What every store of checkpoints promises, held against each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.checkpoints.url_store import UrlStore
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ValidationError,
)

PATH = CheckpointPath.parse("tinker://s1:train:0/weights/first")
OTHER = CheckpointPath.parse("tinker://s1:train:1/weights/second")

Open = Callable[[], CheckpointStore]


@pytest.fixture(params=["folder", "file", "memory", "memory at once"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store, as a restarted service does."""
    if request.param == "memory at once":  # without the hour in which readers may go on
        return lambda: UrlStore(f"memory://{tmp_path}/kept", tmp_path / "work", grace_s=0.0)
    addresses = {
        "folder": str(tmp_path / "kept"),
        "file": f"file://{tmp_path}/kept",
        "memory": f"memory://{tmp_path}/kept",
    }
    return lambda: open_store(addresses[request.param], work=tmp_path / "work")


@pytest.fixture
def store(open_again: Open) -> Iterator[CheckpointStore]:
    with open_again() as opened:
        yield opened


def save(
    store: CheckpointStore,
    path: CheckpointPath = PATH,
    content: bytes = b"weights",
    *,
    origin: str = "",
    overwrite: bool = False,
) -> Manifest:
    """Commit a checkpoint of two files."""
    with store.begin(path, origin=origin) as staging:
        (staging.folder / "adapter_config.json").write_bytes(b"{}")
        (staging.folder / "adapter_model.safetensors").write_bytes(content)
        return staging.commit(overwrite=overwrite)


def weights(store: CheckpointStore, path: CheckpointPath = PATH) -> bytes:
    """What is in the second file."""
    with store.open(path) as reading:
        return (reading.folder / "adapter_model.safetensors").read_bytes()


def test_what_was_committed_is_read_by_the_next_process(open_again: Open) -> None:
    with open_again() as store:
        saved = save(store, content=b"0123456789")

    with open_again() as store:
        found = store.info(PATH)
        assert found == saved
        assert store.exists(PATH)
        assert store.size(PATH) == 12
        assert [file.name for file in found.files] == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert weights(store) == b"0123456789"
        assert store.verify(PATH) == saved


def test_what_is_to_be_computed_with_is_compared_with_what_was_written(
    store: CheckpointStore,
) -> None:
    """Where it was fetched it is fetched again, else it is refused."""
    save(store, content=b"0123456789")
    for damaged in (b"0123456780", b"01234"):  # as long as before, and shorter
        with store.open_whole(PATH) as reading:
            file = reading.folder / "adapter_model.safetensors"
            assert file.read_bytes() == b"0123456789"
            file.chmod(0o600)
            file.write_bytes(damaged)

        if not isinstance(store, UrlStore):
            with pytest.raises(CheckpointDamagedError, match="adapter_model"):
                store.open_whole(PATH)
            return
        with store.open_whole(PATH) as reading:
            assert weights(store) == b"0123456789"


def test_what_was_not_committed_is_not_there(store: CheckpointStore) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "adapter_config.json").write_bytes(b"{}")

    assert not staging.folder.exists()
    assert not store.exists(PATH)
    assert list(store.paths()) == []
    with pytest.raises(CheckpointNotFoundError, match="s1:train:0/weights/first"):
        store.open(PATH)


def test_a_taken_path_is_refused_and_left_as_it_was(store: CheckpointStore) -> None:
    save(store, content=b"old")

    with pytest.raises(CheckpointExistsError, match="another name or overwrite"):
        save(store, content=b"new")

    assert weights(store) == b"old"
    assert store.sweep() == 0


def test_the_same_origin_twice_is_one_checkpoint(store: CheckpointStore) -> None:
    first = save(store, content=b"first run", origin="request-1")

    again = save(store, content=b"second run", origin="request-1")

    assert again == first
    assert weights(store) == b"first run"


def test_overwriting_leaves_readers_what_they_opened(store: CheckpointStore) -> None:
    save(store, content=b"old")
    pieces = store.read(PATH, "adapter_model.safetensors")
    with store.open(PATH) as reading:
        save(store, content=b"new", overwrite=True)

        assert (reading.folder / "adapter_model.safetensors").read_bytes() == b"old"
        assert b"".join(pieces) == b"old"
        store.sweep()
        assert (reading.folder / "adapter_model.safetensors").read_bytes() == b"old"
    assert weights(store) == b"new"
    store.sweep()
    assert store.sweep() == 0
    assert weights(store) == b"new"


def test_a_deleted_checkpoint_is_gone_and_its_readers_go_on(store: CheckpointStore) -> None:
    save(store)
    with store.open(PATH) as reading:
        assert store.delete(PATH)

        assert not store.exists(PATH)
        assert not store.delete(PATH)
        assert (reading.folder / "adapter_model.safetensors").read_bytes() == b"weights"
    store.sweep()
    save(store, content=b"again")
    assert weights(store) == b"again"


def test_a_copy_outlives_its_source(store: CheckpointStore) -> None:
    source = save(store)

    copied = store.copy(PATH, OTHER, origin="copy-1")
    again = store.copy(PATH, OTHER, origin="copy-1")
    store.delete(PATH)

    assert copied == again
    assert copied.files == source.files
    assert weights(store, OTHER) == b"weights"
    store.verify(OTHER)


def test_a_copy_of_nothing_or_onto_something_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError):
        store.copy(PATH, OTHER)
    save(store)
    save(store, OTHER, b"other")

    with pytest.raises(CheckpointExistsError):
        store.copy(PATH, OTHER)

    assert weights(store, OTHER) == b"other"


def test_ranges_of_files(store: CheckpointStore) -> None:
    save(store, content=b"0123456789")
    file = "adapter_model.safetensors"

    assert b"".join(store.read(PATH, file)) == b"0123456789"
    assert b"".join(store.read(PATH, file, 3, 5)) == b"34"
    assert b"".join(store.read(PATH, file, 10)) == b""
    for start, stop in [(-1, 3), (5, 3), (0, 11), (11, None)]:
        with pytest.raises(ValidationError, match="10 bytes"):
            store.read(PATH, file, start, stop)
    for name in ["missing", "../checkpoint.json", "checkpoint.json"]:
        with pytest.raises(CheckpointNotFoundError, match="has no file"):
            store.read(PATH, name)


def test_a_range_is_of_the_version_that_it_was_chosen_by(store: CheckpointStore) -> None:
    file = "adapter_model.safetensors"
    old = save(store, content=b"old and long")
    new = save(store, content=b"new", overwrite=True)

    assert b"".join(store.read(PATH, file, 1, 3, version=new.version)) == b"ew"
    with pytest.raises(CheckpointNotFoundError, match="was overwritten"):
        store.read(PATH, file, 5, 9, version=old.version)


def test_only_plain_files_can_be_committed(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")

    def link(folder: Path) -> None:
        (folder / "x").symlink_to(tmp_path / "secret")

    hostile: list[Callable[[Path], object]] = [
        lambda _: None,
        lambda folder: (folder / "folder").mkdir(),
        lambda folder: (folder / "checkpoint.json").write_text("{}"),
        lambda folder: (folder / "a b").write_text(""),
        lambda folder: (folder / ".hidden").write_text(""),
        link,
    ]
    for write in hostile:
        with store.begin(PATH) as staging:
            write(staging.folder)
            with pytest.raises(ValidationError):
                staging.commit()
    assert not store.exists(PATH)


def test_paths_of_a_run_and_snapshots_of_a_model(store: CheckpointStore) -> None:
    snapshots = [CheckpointPath.snapshot("s1:train:0", position) for position in (9, 10, 100)]
    strange = CheckpointPath("s1:train:0", "sampler_weights", "größe 1 (é)")
    sampler = CheckpointPath.sampler("s1:sample:0")
    for path in [PATH, OTHER, strange, sampler, *reversed(snapshots)]:
        save(store, path)

    assert set(store.paths()) == {PATH, OTHER, strange, sampler, *snapshots}
    assert all(CheckpointPath.parse(str(path)) == path for path in store.paths())
    assert set(store.paths("s1:train:0")) == {PATH, strange, *snapshots}
    assert store.snapshots("s1:train:0") == snapshots
    assert store.snapshots("s1:train:1") == []


def test_sweep_leaves_what_is_being_written(store: CheckpointStore, open_again: Open) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "x").write_text("x")

        with open_again() as other:
            assert other.sweep() == 0

        staging.commit()
    assert store.exists(PATH)


def test_a_staging_is_committed_once(store: CheckpointStore) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "x").write_text("x")
        staging.commit()
        with pytest.raises(ValidationError, match="was committed"):
            staging.commit(overwrite=True)
    with pytest.raises(ValidationError, match="was committed"):
        staging.commit()


def test_editions_of_a_name_are_apart(open_again: Open) -> None:
    """Whoever saves under it, in whatever order, replaces and deletes nothing of another."""
    first, second = PATH.new_edition(1), PATH.new_edition(2)
    with open_again() as store:
        save(store, PATH, b"from before")
        save(store, second, b"second")
        save(store, first, b"first")
        assert set(store.paths(PATH.run_id)) == {PATH, first, second}

        assert store.delete(first)
        store.sweep()

    with open_again() as store:
        assert [weights(store, path) for path in (PATH, second)] == [b"from before", b"second"]
        assert set(store.paths()) == {PATH, second}
        assert store.delete(PATH)
        store.sweep()
        assert weights(store, second) == b"second"


@pytest.mark.parametrize(
    "path", [PATH, CheckpointPath.snapshot("m", 12), CheckpointPath.sampler("s:sample:1")]
)
def test_an_edition_is_read_back_from_its_text_and_its_place(path: CheckpointPath) -> None:
    edition = path.new_edition(12)

    assert edition != path.new_edition(12), "each is another"
    assert (edition.epoch, path.epoch) == (12, 0)
    assert CheckpointPath.parse(str(edition)) == edition
    assert CheckpointPath.from_parts(edition.parts) == edition
    assert edition.in_edition("") == path


@pytest.mark.parametrize("text", ["", "7", "0-0123456789abcdef", "7-../../../../etc/pas", "7-abc"])
def test_what_is_no_edition_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        CheckpointPath.parse(f"{PATH}#{text}")
