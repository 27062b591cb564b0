"""What every store of checkpoints promises, held against each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.s3_server import BUCKET, S3Server
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


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an empty bucket."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.remove()


@pytest.fixture(params=["folder", "file", "memory", "memory at once", "s3"])
def open_again(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Opens the same store, as a restarted service does."""
    if request.param == "s3":
        for name, value in request.getfixturevalue("s3").environment().items():
            monkeypatch.setenv(name, value)
        return lambda: open_store(f"s3://{BUCKET}/{tmp_path.name}/kept", work=tmp_path / "work")
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


def test_a_committed_checkpoint_is_readable_by_the_next_process(open_again: Open) -> None:
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
        with store.open_whole(PATH) as reading:
            assert reading.manifest == saved


def test_opening_a_whole_checkpoint_verifies_its_content(
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


def test_an_uncommitted_checkpoint_does_not_exist(store: CheckpointStore) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "adapter_config.json").write_bytes(b"{}")

    assert not staging.folder.exists()
    assert not store.exists(PATH)
    assert list(store.paths()) == []
    with pytest.raises(CheckpointNotFoundError, match="s1:train:0/weights/first"):
        store.open(PATH)


def test_saving_to_an_existing_path_is_rejected_and_leaves_it_unchanged(
    store: CheckpointStore,
) -> None:
    save(store, content=b"old")

    with pytest.raises(CheckpointExistsError, match="another name, or overwrite"):
        save(store, content=b"new")

    assert weights(store) == b"old"
    assert store.sweep() == 0


def test_committing_the_same_origin_twice_makes_one_checkpoint(store: CheckpointStore) -> None:
    first = save(store, content=b"first run", origin="request-1")

    again = save(store, content=b"second run", origin="request-1")

    assert again == first
    assert weights(store) == b"first run"


def test_overwriting_does_not_disturb_open_readers(store: CheckpointStore) -> None:
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


def test_deleting_a_checkpoint_does_not_disturb_open_readers(store: CheckpointStore) -> None:
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
    store.open_whole(OTHER).close()


def test_copying_a_missing_source_or_onto_an_existing_target_is_rejected(
    store: CheckpointStore,
) -> None:
    with pytest.raises(CheckpointNotFoundError):
        store.copy(PATH, OTHER)
    save(store)
    save(store, OTHER, b"other")

    with pytest.raises(CheckpointExistsError):
        store.copy(PATH, OTHER)

    assert weights(store, OTHER) == b"other"


def test_byte_ranges_of_files_are_read_and_validated(store: CheckpointStore) -> None:
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


def test_a_range_is_read_from_the_requested_version_only(store: CheckpointStore) -> None:
    file = "adapter_model.safetensors"
    old = save(store, content=b"old and long")
    new = save(store, content=b"new", overwrite=True)

    assert b"".join(store.read(PATH, file, 1, 3, version=new.version)) == b"ew"
    with pytest.raises(CheckpointNotFoundError, match="has been overwritten"):
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


def test_paths_are_listed_by_run_and_snapshots_by_model(store: CheckpointStore) -> None:
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


def test_sweep_keeps_a_checkpoint_that_is_being_written(
    store: CheckpointStore, open_again: Open
) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "x").write_text("x")

        with open_again() as other:
            assert other.sweep() == 0

        staging.commit()
    assert store.exists(PATH)


def test_a_staging_can_be_committed_only_once(store: CheckpointStore) -> None:
    with store.begin(PATH) as staging:
        (staging.folder / "x").write_text("x")
        staging.commit()
        with pytest.raises(ValidationError, match="was committed"):
            staging.commit(overwrite=True)
    with pytest.raises(ValidationError, match="was committed"):
        staging.commit()


def test_editions_of_a_name_are_independent(open_again: Open) -> None:
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
def test_an_edition_round_trips_through_its_string_and_its_parts(path: CheckpointPath) -> None:
    edition = path.new_edition(12)

    assert edition != path.new_edition(12), "each is another"
    assert (edition.epoch, path.epoch) == (12, 0)
    assert CheckpointPath.parse(str(edition)) == edition
    assert CheckpointPath.from_parts(edition.parts) == edition
    assert edition.in_edition("") == path


@pytest.mark.parametrize("text", ["", "7", "0-0123456789abcdef", "7-../../../../etc/pas", "7-abc"])
def test_an_invalid_edition_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError):
        CheckpointPath.parse(f"{PATH}#{text}")
