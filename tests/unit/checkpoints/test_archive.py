from __future__ import annotations

import io
import itertools
import random
import tarfile
from pathlib import Path

import pytest

from tests.unit.checkpoints.adapters import an_adapter, same_layers
from tinsmith.checkpoints.archive import Archive
from tinsmith.checkpoints.base import PIECE_BYTES
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.format import Layout, read_adapter, write_adapter
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


def test_archives_carry_the_names_that_tools_read(store: FolderStore, tmp_path: Path) -> None:
    folder = unpacked(Archive(store, PATH), tmp_path / "out")

    names = read_header(folder / "adapter_model.safetensors").tensors
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert not any("lm_head" in name for name in names)
    same_layers(read_adapter(folder), an_adapter())
    assert (folder / "z.bin").read_bytes() == bytes(PIECE_BYTES * 2 + 3)
    assert (folder / "empty").read_bytes() == b""


def test_in_the_layout_of_peft_files_are_as_they_lie(store: FolderStore, tmp_path: Path) -> None:
    folder = unpacked(Archive(store, PATH, layout=Layout.PEFT), tmp_path / "out")

    for file in store.info(PATH).files:
        assert (folder / file.name).read_bytes() == b"".join(store.read(PATH, file.name))


def test_size_and_bytes_are_known_and_the_same_each_time(store: FolderStore) -> None:
    archive = Archive(store, PATH)

    assert archive.size_bytes == len(whole(archive))
    assert whole(archive) == whole(Archive(store, PATH))
    assert archive.tag == Archive(store, PATH).tag
    assert archive.tag != Archive(store, PATH, layout=Layout.PEFT).tag
    assert max(map(len, archive.read())) <= PIECE_BYTES


def test_any_range_is_that_part_of_the_whole(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    content = whole(archive)
    places = [0, 1, 511, 512, 513, 1024, len(content) - 1, len(content)]
    places += random.Random(0).sample(range(len(content)), 12)

    for start, stop in itertools.combinations_with_replacement(sorted(places), 2):
        assert b"".join(archive.read(start, stop)) == content[start:stop]
    for start, stop in [(-1, 2), (3, 2), (0, len(content) + 1)]:
        with pytest.raises(ValidationError, match=f"{len(content)} bytes"):
            archive.read(start, stop)


def test_a_file_that_was_cut_short_is_an_error_and_not_a_short_archive(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    pieces = archive.read()
    with store.open(PATH) as reading:
        (reading.folder / "z.bin").write_bytes(b"x")

    with pytest.raises(CheckpointDamagedError, match="shorter"):
        b"".join(pieces)


def test_an_archive_never_mixes_two_checkpoints(store: FolderStore) -> None:
    archive = Archive(store, PATH)
    before = whole(archive)
    pieces = archive.read()
    save(store)

    with pytest.raises(CheckpointNotFoundError, match="was overwritten"):
        archive.read()
    assert b"".join(pieces) == before
    assert store.sweep() == 1
    assert Archive(store, PATH).tag != archive.tag


def test_a_download_that_is_given_up_lets_go_of_the_checkpoint(store: FolderStore) -> None:
    begun, never_begun = Archive(store, PATH).read(), Archive(store, PATH).read()
    next(begun)
    del begun, never_begun

    store.delete(PATH)

    assert not store.place(PATH).exists()


def test_the_archive_of_an_engines_own_tensors_keeps_their_names(tmp_path: Path) -> None:
    import numpy as np

    from tinsmith.checkpoints.safetensors_file import write_tensors

    store = FolderStore(tmp_path / "store")
    with store.begin(PATH) as staging:
        arrays = {"numbers": np.arange(3.0)}
        write_tensors(staging.folder / "adapter_model.safetensors", arrays)
        staging.commit()

    folder = unpacked(Archive(store, PATH), tmp_path / "out")

    assert list(read_header(folder / "adapter_model.safetensors").tensors) == ["numbers"]
