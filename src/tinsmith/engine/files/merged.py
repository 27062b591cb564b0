"""A base model with an adapter folded into its weights: a folder that needs no LoRA to be loaded.

Each adapted weight becomes `W + alpha / rank * B @ A`, computed in float32 and rounded to the dtype
of the base model's file; all other weights are copied unchanged. One weight at a time is in memory.

If the adapter changes the output layer of a model with tied embeddings, the merged model gets an
output layer of its own, and its `config.json` says so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from tinsmith.checkpoints.format import OUTPUT_LAYER, LoraPair, StoredAdapter
from tinsmith.checkpoints.safetensors_file import (
    Header,
    TensorEntry,
    encode_header,
    read_header,
    read_tensor,
)
from tinsmith.engine.files.base import ReportProgress
from tinsmith.engine.files.cache import MANIFEST, ignore_progress
from tinsmith.engine.files.gguf_weights import bfloat16_bits
from tinsmith.engine.model.weight_files import INDEX, weight_files
from tinsmith.errors import BaseModelFormatError, CheckpointFormatError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

CARD = "README.md"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = f"{OUTPUT_LAYER}.weight"
_FLOATS = frozenset({"F32", "F16", "BF16"})
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"})
_TRANSPOSED = frozenset({"gpt2", "openai-gpt"})
"""Model types whose linear weights have shape inputs × outputs."""
_COPIED_BYTES = 16 << 20


class _Weight(msgspec.Struct, frozen=True):
    """One weight of the merged model, and where it comes from."""

    name: str
    source: str
    """The weight of the base model that it is made from; its own name unless it was tied."""
    entry: TensorEntry
    """The entry of the source weight."""
    pair: LoraPair | None
    """The LoRA factors to add, if any."""


def merge_adapter(
    base: Path,
    adapter: StoredAdapter,
    folder: Path,
    *,
    report: ReportProgress = ignore_progress,
    card: str | None = None,
) -> None:
    """Merge an adapter into a base model and write the result into an empty folder.

    Args:
        base: The folder of the base model, with safetensors.
        adapter: The adapter. Its layers have the names of the base model's.
        folder: The empty folder to write to.
        report: Called with the progress.
        card: The model card, written as `README.md`; the base model's is not copied.

    Raises:
        BaseModelFormatError: The base model has no readable weights.
        CheckpointFormatError: The adapter is not for this model.
        OSError: A file could not be read or written.
    """
    files = [path.name for path in weight_files(base)]
    _refuse_transposed(base / "config.json")
    headers = {file: read_header(base / file) for file in files}
    is_untied = _fit(adapter, headers)
    total, done = sum(header.data_bytes for header in headers.values()), 0
    placed: dict[str, str] = {}
    for file, header in headers.items():
        weights = list(_weights(header, adapter, is_untied))
        _write(base / file, folder / file, header, weights, adapter.alpha / adapter.rank)
        placed |= {weight.name: file for weight in weights}
        done += header.data_bytes
        report("merging", done, total)
    _copy_rest(base, folder)
    if OUTPUT_LAYER in adapter.layers:
        _say_untied(folder / "config.json")
    if len(files) > 1:
        _write_index(folder, placed)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")


# Checks


def _refuse_transposed(config: Path) -> None:
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if fields.get("model_type") in _TRANSPOSED:
        # Square ones would be merged wrongly, and nothing in the file shows it.
        raise BaseModelFormatError(
            f"{fields['model_type']} models cannot be merged: they store weights transposed",
            remedy="load the adapter without merging it, or merge with peft",
        )


def _fit(adapter: StoredAdapter, headers: dict[str, Header]) -> bool:
    """Check that the adapter fits this model; return whether an output layer must be added."""
    entries = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    is_untied = OUTPUT_LAYER in adapter.layers and OUTPUT not in entries
    for layer, pair in adapter.layers.items():
        name = EMBEDDING if is_untied and layer == OUTPUT_LAYER else f"{layer}.weight"
        entry = entries.get(name)
        if entry is None:
            raise CheckpointFormatError(
                f"the base model has no layer {layer}, which the adapter changes"
            )
        if entry.dtype not in _FLOATS:
            raise CheckpointFormatError(
                f"the base model's {name} has dtype {entry.dtype}, which cannot be merged into",
                remedy="use a base model that is not quantised",
            )
        wanted = (pair.b.shape[0], pair.a.shape[1])
        if entry.shape != wanted:
            raise CheckpointFormatError(
                f"layer {layer} is {list(entry.shape)} in the base model; the adapter is for one "
                f"of {list(wanted)}"
            )
    return is_untied


def _weights(header: Header, adapter: StoredAdapter, is_untied: bool) -> Iterator[_Weight]:
    """The weights of one file, in file order."""
    by_place = sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
    for name, entry in by_place:
        pair = adapter.layers.get(name.removesuffix(".weight"))
        yield _Weight(name, name, entry, pair)
    if is_untied and EMBEDDING in header.tensors:
        yield _Weight(OUTPUT, EMBEDDING, header.tensors[EMBEDDING], adapter.layers[OUTPUT_LAYER])


# Writing


def _write(
    source: Path, target: Path, header: Header, weights: list[_Weight], scale: float
) -> None:
    entries: dict[str, TensorEntry] = {}
    end = 0
    for weight in weights:
        start, stop = weight.entry.data_offsets
        place = (end, end + stop - start)
        entries[weight.name] = msgspec.structs.replace(weight.entry, data_offsets=place)
        end = place[1]
    with source.open("rb") as content, target.open("xb") as out:
        out.write(encode_header(entries, header.metadata))
        for weight in weights:
            if weight.pair is None:
                _copy(content, header, weight.entry, out)
            else:
                base: Any = read_tensor(content, header, weight.source)
                out.write(merged_bytes(weight.name, base, weight.pair, scale, weight.entry.dtype))


def _copy(content: BinaryIO, header: Header, entry: TensorEntry, out: BinaryIO) -> None:
    start, stop = entry.data_offsets
    content.seek(header.data_start + start)
    left = stop - start
    while left:
        piece = content.read(min(left, _COPIED_BYTES))
        if not piece:
            raise BaseModelFormatError(f"{content.name} is truncated")
        out.write(piece)
        left -= len(piece)


def merged_bytes(
    name: str, base_OI: Floats, pair: LoraPair, scale: float, dtype: str
) -> memoryview:
    """The bytes of a weight with its LoRA factors merged, rounded to a safetensors dtype.

    Raises:
        CheckpointFormatError: A number overflows the dtype.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # overflow is refused below
        added_OI = pair.b.astype(np.float32) @ pair.a.astype(np.float32)
        sum_OI = np.ascontiguousarray(base_OI.astype(np.float32) + np.float32(scale) * added_OI)
        rounded: Any = sum_OI.astype(np.float16) if dtype == "F16" else sum_OI
    if not np.isfinite(rounded).all():
        raise CheckpointFormatError(f"{name} has values that its dtype cannot represent")
    if dtype == "BF16":
        rounded = bfloat16_bits(sum_OI)
    return memoryview(rounded.reshape(-1).view(np.uint8))


def _copy_rest(base: Path, folder: Path) -> None:
    """Copy the other files of the model: configuration, tokenizer, licence."""
    for path in sorted(base.iterdir()):
        is_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name not in (MANIFEST, CARD):
            shutil.copyfile(path, folder / path.name)


def _say_untied(config: Path) -> None:
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["tie_word_embeddings"] = False
    config.write_text(json.dumps(fields, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_index(folder: Path, placed: dict[str, str]) -> None:
    size = sum(read_header(folder / file).data_bytes for file in set(placed.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
