from __future__ import annotations

import io
import itertools
import random
import tarfile
from pathlib import Path

import pytest

from tests.unit.checkpoints.adapters import an_adapter, same_layers
from tinsmith.checkpoints.archive import Archive, give_peft_names
from tinsmith.checkpoints.base import PIECE_BYTES
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.format import ADAPTER_MODEL, Layout, read_adapter, write_adapter
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.safetensors_file import read_header
from tinsmith.errors import CheckpointDamagedError, CheckpointNotFoundError, ValidationError

PATH = CheckpointPath.parse("tinker://run/sampler_weights/a")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    made = FolderStore(tmp_path / "store")
    save(made)
    return made


def save(store: FolderStore) -> None:
    with store.begin(PATH) as staging:
        write_adapter(staging.folder, an_adapter())
        (staging.folder / "empty").touch()
        (staging.folder / "z.bin").write_bytes(bytes(PIECE_BYTES * 2 + 3))
        staging.commit(overwrite=True)


def whole(archive: Archive) -> bytes:
    return b"".join(archive.read())


def unpacked(archive: Archive, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(whole(archive))) as tar:
        tar.extractall(folder, filter="data")
    return folder


def test_archives_contain_the_file_names_that_tools_expect(
    store: FolderStore, tmp_path: Path
) -> None:
    folder = unpacked(Archive(store, PATH), tmp_path / "out")

    names = read_header(folder / "adapter_model.safetensors").tensors
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert not any("lm_head" in name for name in names)
    same_layers(read_adapter(folder), an_adapter())
    assert (folder / "z.bin").read_bytes() == bytes(PIECE_BYTES * 2 + 3)
    assert (folder / "empty").read_bytes() == b""


def test_in_the_peft_layout_files_are_archived_unchanged(
    store: FolderStore, tmp_path: Path
) -> None:
    folder = unpacked(Archive(store, PATH, layout=Layout.PEFT), tmp_path / "out")

    for file in store.info(PATH).files:
        assert (folder / file.name).read_bytes() == b"".join(store.read(PATH, file.name))


def test_an_archive_has_a_known_size_and_reproducible_bytes(store: FolderStore) -> None:
    archive = Archive(store, PATH)

    assert archive.size_bytes == len(whole(archive))
    assert whole(archive) == whole(Archive(store, PATH))
    assert archive.tag == Archive(store, PATH).tag
    assert archive.tag != Archive(store, PATH, layout=Layout.PEFT).tag
    assert max(map(len, archive.read())) <= PIECE_BYTES


def test_any_range_equals_that_slice_of_the_archive(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    content = whole(archive)
    places = [0, 1, 511, 512, 513, 1024, len(content) - 1, len(content)]
    places += random.Random(0).sample(range(len(content)), 12)

    for start, stop in itertools.combinations_with_replacement(sorted(places), 2):
        assert b"".join(archive.read(start, stop)) == content[start:stop]
    for start, stop in [(-1, 2), (3, 2), (0, len(content) + 1)]:
        with pytest.raises(ValidationError, match=f"{len(content)} bytes"):
            archive.read(start, stop)


def test_a_truncated_file_is_an_error_not_a_short_archive(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    pieces = archive.read()
    with store.open(PATH) as reading:
        (reading.folder / "z.bin").write_bytes(b"x")

    with pytest.raises(CheckpointDamagedError, match="truncated"):
        b"".join(pieces)


def test_an_archive_never_mixes_two_checkpoints(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    before = whole(archive)
    pieces = archive.read()
    save(store)

    with pytest.raises(CheckpointNotFoundError, match="has been overwritten"):
        archive.read()
    assert b"".join(pieces) == before
    assert store.sweep() == 1
    assert Archive(store, PATH).tag != archive.tag


def test_an_abandoned_download_releases_the_checkpoint(store: FolderStore) -> None:
    begun, never_begun = Archive(store, PATH).read(), Archive(store, PATH).read()
    next(begun)
    del begun, never_begun

    store.delete(PATH)

    assert not store.place(PATH).exists()


def test_an_archive_of_engine_specific_tensors_keeps_their_names(tmp_path: Path) -> None:
    import numpy as np

    from tinsmith.checkpoints.safetensors_file import write_tensors

    store = FolderStore(tmp_path / "store")
    with store.begin(PATH) as staging:
        arrays = {"numbers": np.arange(3.0)}
        write_tensors(staging.folder / "adapter_model.safetensors", arrays)
        staging.commit()

    folder = unpacked(Archive(store, PATH), tmp_path / "out")

    assert list(read_header(folder / "adapter_model.safetensors").tensors) == ["numbers"]


def written(folder: Path, layout: Layout) -> Path:
    folder.mkdir()
    write_adapter(folder, an_adapter(), layout=layout)
    return folder


def test_weights_of_an_archive_are_renamed_for_peft(tmp_path: Path) -> None:
    """Which knows no others, and says nothing of those that it leaves out."""
    archived = written(tmp_path / "archived", Layout.TINKER)
    expected = written(tmp_path / "expected", Layout.PEFT)

    give_peft_names(archived)

    names = set(read_header(archived / ADAPTER_MODEL).tensors)
    assert names == set(read_header(expected / ADAPTER_MODEL).tensors)
    assert "base_model.model.lm_head.lora_A.weight" in names
    same_layers(read_adapter(archived), an_adapter())
    assert sorted(path.name for path in archived.iterdir()) == sorted(
        path.name for path in expected.iterdir()
    )


def test_weights_with_peft_names_are_left_unchanged(tmp_path: Path) -> None:
    folder = written(tmp_path / "folder", Layout.PEFT)
    before = (folder / ADAPTER_MODEL).read_bytes(), (folder / ADAPTER_MODEL).stat().st_ino

    give_peft_names(folder)

    after = (folder / ADAPTER_MODEL).read_bytes(), (folder / ADAPTER_MODEL).stat().st_ino
    assert after == before


def test_files_that_are_not_weights_are_left_unchanged(tmp_path: Path) -> None:
    give_peft_names(tmp_path)
    (tmp_path / ADAPTER_MODEL).write_bytes(b"something else")

    give_peft_names(tmp_path)

    assert (tmp_path / ADAPTER_MODEL).read_bytes() == b"something else"
