from __future__ import annotations

from pathlib import Path

from tests.unit.checkpoints.adapters import an_adapter, same_layers
from tinsmith.checkpoints.format import ADAPTER_MODEL, Layout, read_adapter, write_adapter
from tinsmith.checkpoints.peft_names import give_peft_names
from tinsmith.checkpoints.safetensors_file import read_header


def written(folder: Path, layout: Layout) -> Path:
    folder.mkdir()
    write_adapter(folder, an_adapter(), layout=layout)
    return folder


def test_weights_of_an_archive_get_the_names_that_peft_loads(tmp_path: Path) -> None:
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


def test_weights_that_have_them_are_left_as_they_are(tmp_path: Path) -> None:
    folder = written(tmp_path / "folder", Layout.PEFT)
    before = (folder / ADAPTER_MODEL).read_bytes(), (folder / ADAPTER_MODEL).stat().st_ino

    give_peft_names(folder)

    after = (folder / ADAPTER_MODEL).read_bytes(), (folder / ADAPTER_MODEL).stat().st_ino
    assert after == before


def test_what_is_no_file_of_weights_is_left_alone(tmp_path: Path) -> None:
    give_peft_names(tmp_path)
    (tmp_path / ADAPTER_MODEL).write_bytes(b"something else")

    give_peft_names(tmp_path)

    assert (tmp_path / ADAPTER_MODEL).read_bytes() == b"something else"
