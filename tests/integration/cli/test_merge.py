"""`tinsmith checkpoint merge`, as a process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.integration.cli.command import Commands
from tinsmith.checkpoints.format import LoraPair, StoredAdapter, write_adapter
from tinsmith.checkpoints.safetensors_file import read_tensors, write_tensors

LAYER = "model.layers.0.self_attn.q_proj"


def a_base(folder: Path) -> Path:
    folder.mkdir()
    write_tensors(
        folder / "model.safetensors",
        {
            f"{LAYER}.weight": np.ones((4, 6), np.float32),
            "model.embed_tokens.weight": np.zeros((8, 6), np.float32),
        },
    )
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    return folder


def an_adapter(folder: Path, base_model: str) -> Path:
    folder.mkdir()
    pair = LoraPair(np.full((2, 6), 0.5, np.float32), np.full((4, 2), 3.0, np.float32))
    write_adapter(
        folder, StoredAdapter(base_model=base_model, rank=2, alpha=4.0, layers={LAYER: pair})
    )
    return folder


def test_an_adapter_is_merged_with_the_base_model_that_it_names(
    tinsmith: Commands, tmp_path: Path
) -> None:
    base = a_base(tmp_path / "base")
    adapter = an_adapter(tmp_path / "adapter", str(base))

    ended = tinsmith.run("checkpoint", "merge", str(adapter), "-o", "merged", "-f", "json")

    assert ended.status == 0, ended.err
    merged = tinsmith.folder / "merged"
    weights = read_tensors(merged / "model.safetensors")
    assert np.array_equal(weights[f"{LAYER}.weight"], np.full((4, 6), 1 + 4 / 2 * 2 * 0.5 * 3.0))
    assert ended.json["base_model"] == str(base)
    assert ended.json["file_size_bytes"] == sum(path.stat().st_size for path in merged.iterdir())
    assert json.loads((merged / "config.json").read_text()) == {"tie_word_embeddings": True}
    assert str(adapter) in (merged / "README.md").read_text()


def test_an_existing_output_folder_is_replaced_only_on_request(
    tinsmith: Commands, tmp_path: Path
) -> None:
    base = a_base(tmp_path / "base")
    adapter = an_adapter(tmp_path / "adapter", "another name")
    (tinsmith.folder / "merged").mkdir()
    words = ("checkpoint", "merge", str(adapter), "-o", "merged", "--base-model", str(base))

    refused = tinsmith.run(*words)
    replaced = tinsmith.run(*words, "--force")

    assert refused.status == 1
    assert "--force" in refused.err
    assert replaced.status == 0, replaced.err
    assert (tinsmith.folder / "merged" / "model.safetensors").exists()
    assert not (tinsmith.folder / "merged.partial").exists()


def test_an_adapter_that_does_not_match_its_base_model_leaves_nothing_behind(
    tinsmith: Commands, tmp_path: Path
) -> None:
    base = a_base(tmp_path / "base")
    write_tensors_anew(base / "model.safetensors", np.ones((4, 7), np.float32))
    adapter = an_adapter(tmp_path / "adapter", str(base))

    ended = tinsmith.run("checkpoint", "merge", str(adapter), "-o", "merged", "-f", "json")

    assert ended.status == 1
    assert "q_proj is [4, 7]" in ended.error["message"]
    assert not list(tinsmith.folder.glob("merged*"))


def write_tensors_anew(file: Path, array: np.ndarray) -> None:
    file.unlink()
    write_tensors(file, {f"{LAYER}.weight": array})
