"""Export an adapter of a tied output layer in a form that `peft` merges correctly.

If the output layer of a base model shares its weights with the embedding, `peft`'s
`merge_and_unload` adds the layer's factors to the shared matrix, which changes the untrained input
embedding too. With the layer stored as a whole (`modules_to_save`), `peft` gives the same results
merged and unmerged.

The factors stay in the file: `peft` ignores them, and `tinsmith checkpoint import` continues
training from them. vLLM does not load adapters with `modules_to_save`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.format import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    FULL_OUTPUT_LAYER,
    OUTPUT_LAYER,
    TIED,
    Layout,
    read_adapter,
    tensor_name,
)
from tinsmith.checkpoints.safetensors_file import (
    TensorEntry,
    encode_header,
    read_header,
    read_tensor,
)
from tinsmith.engine.files.merged import EMBEDDING, merged_bytes
from tinsmith.engine.model.weight_files import weight_files
from tinsmith.errors import CheckpointFormatError

_COPY_BYTES = 1 << 20


def is_of_tied_layer(folder: Path, base: Path | None) -> bool:
    """Whether an adapter has factors of an output layer that is tied to the embedding.

    Args:
        folder: The folder of the adapter, with `peft`'s tensor names.
        base: The folder of the base model, if known. Without it, the answer is what the service
            recorded when it saved the adapter.
    """
    try:
        header = read_header(folder / ADAPTER_MODEL)
    except (CheckpointFormatError, OSError):
        return False  # encrypted, or not an adapter
    if tensor_name(OUTPUT_LAYER, "A", Layout.PEFT) not in header.tensors:
        return False
    if TIED.items() <= header.metadata.items():
        return True
    return base is not None and _ties(base)


def _ties(base: Path) -> bool:
    names = {name for file in weight_files(base) for name in read_header(file).tensors}
    return EMBEDDING in names and f"{OUTPUT_LAYER}.weight" not in names


def fold_output_layer(folder: Path, base: Path) -> None:
    """Add the merged output layer to an adapter's folder, for `peft` to use instead of the factors.

    Args:
        folder: The folder of the adapter, with `peft`'s tensor names; changed in place.
        base: The folder of the base model, with safetensors.

    Raises:
        CheckpointFormatError: The adapter does not fit this model.
        OSError: A file could not be read or written.
    """
    adapter = read_adapter(folder)
    source = next(
        (file for file in weight_files(base) if EMBEDDING in read_header(file).tensors), None
    )
    pair = adapter.layers[OUTPUT_LAYER]
    shape = (pair.b.shape[0], pair.a.shape[1])
    if source is None:
        raise CheckpointFormatError(
            f"{base} has no {EMBEDDING}, to which its output layer is tied",
            remedy="download the adapter with --for vllm, and do not merge it with peft",
        )
    header = read_header(source)
    entry = header.tensors[EMBEDDING]
    if entry.shape != shape:
        raise CheckpointFormatError(
            f"the adapter's output layer has shape {list(shape)}, "
            f"but {base} has {list(entry.shape)}"
        )
    with source.open("rb") as content:
        base_VH: Any = read_tensor(content, header, EMBEDDING)
    scale = adapter.alpha / adapter.rank
    _append(
        folder / ADAPTER_MODEL,
        entry.dtype,
        shape,
        merged_bytes(FULL_OUTPUT_LAYER, base_VH, pair, scale, entry.dtype),
    )
    _say(folder / ADAPTER_CONFIG)


def _append(file: Path, dtype: str, shape: tuple[int, int], content: memoryview) -> None:
    header = read_header(file)
    start = header.data_bytes
    added = TensorEntry(dtype=dtype, shape=shape, data_offsets=(start, start + len(content)))
    new = file.with_name(f"{file.name}.new")
    with file.open("rb") as old, new.open("wb") as out:
        out.write(encode_header({**header.tensors, FULL_OUTPUT_LAYER: added}, header.metadata))
        old.seek(header.data_start)
        shutil.copyfileobj(old, out, _COPY_BYTES)
        out.write(content)
    new.replace(file)


def _say(config: Path) -> None:
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["modules_to_save"] = [OUTPUT_LAYER]
    fields["target_modules"] = [
        module for module in fields.get("target_modules", []) if module != OUTPUT_LAYER
    ]
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
