"""A base model with an adapter folded into its weights: a folder that needs no LoRA to be loaded.

Each adapted weight becomes `W + alpha / rank * B @ A`, computed in float32 and rounded to the type
that the base model's file has; everything else is copied as it is. One weight at a time is in
memory.

An adapter may change the output layer of a model that has none of its own, because it shares its
embedding. The merged model then has one, and its `config.json` says so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from tinsmith.checkpoints.format import OUTPUT_LAYER, Adapter, LoraPair
from tinsmith.checkpoints.safetensors_file import (
    Header,
    TensorEntry,
    encode_header,
    read_header,
    read_tensor,
)
from tinsmith.errors import BaseModelFormatError, CheckpointFormatError
from tinsmith.model.weight_files import INDEX, weight_files
from tinsmith.model_files.base import Tell
from tinsmith.model_files.cache import tell_nobody
from tinsmith.model_files.gguf_weights import bfloat16_bits
from tinsmith.model_files.manifest import MANIFEST

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
"""Models whose linear layers are of inputs × outputs."""
_COPIED_BYTES = 16 << 20


class _Weight(msgspec.Struct, frozen=True):
    """One weight of the merged model, and where it comes from."""

    name: str
    source: str
    """Another name where it is made of another weight."""
    entry: TensorEntry
    """Of the source."""
    pair: LoraPair | None
    """What is added to it."""


def merge_adapter(
    base: Path, adapter: Adapter, folder: Path, *, tell: Tell = tell_nobody, card: str | None = None
) -> None:
    """Write a model with the adapter folded in into an empty folder.

    Args:
        base: The folder of the base model, with safetensors.
        adapter: What to fold in. Its layers are called as those of the base model.
        folder: Where the files go.
        tell: Called with the progress.
        card: A page about the model, written as `README.md`; that of the base is not copied.

    Raises:
        BaseModelFormatError: The base model has no weights that can be read.
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
        tell("merging", done, total)
    _copy_rest(base, folder)
    if OUTPUT_LAYER in adapter.layers:
        _say_untied(folder / "config.json")
    if len(files) > 1:
        _write_index(folder, placed)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")


# What there is


def _refuse_transposed(config: Path) -> None:
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if fields.get("model_type") in _TRANSPOSED:
        # Square ones would be merged wrongly, and nothing in the file tells.
        raise BaseModelFormatError(
            f"models of the kind {fields['model_type']} have their weights the other way round",
            remedy="use the adapter beside the base model, or merge with peft",
        )


def _fit(adapter: Adapter, headers: dict[str, Header]) -> bool:
    """Check that the adapter is for this model; whether its output layer has to be made."""
    entries = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    is_untied = OUTPUT_LAYER in adapter.layers and OUTPUT not in entries
    for layer, pair in adapter.layers.items():
        name = EMBEDDING if is_untied and layer == OUTPUT_LAYER else f"{layer}.weight"
        entry = entries.get(name)
        if entry is None:
            raise CheckpointFormatError(f"the base model has no layer {layer}, which is adapted")
        if entry.dtype not in _FLOATS:
            raise CheckpointFormatError(
                f"the base model's {name} is of type {entry.dtype}, which nothing can be added to",
                remedy="take a base model that is not quantised",
            )
        wanted = (pair.b.shape[0], pair.a.shape[1])
        if entry.shape != wanted:
            raise CheckpointFormatError(
                f"layer {layer} is {list(entry.shape)} in the base model; the adapter is for one "
                f"of {list(wanted)}"
            )
    return is_untied


def _weights(header: Header, adapter: Adapter, is_untied: bool) -> Iterator[_Weight]:
    """The weights of one file, in the order in which they lie there."""
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
            raise BaseModelFormatError(f"{content.name} ends too early")
        out.write(piece)
        left -= len(piece)


def merged_bytes(
    name: str, base_OI: Floats, pair: LoraPair, scale: float, dtype: str
) -> memoryview:
    """The bytes of a weight with its adapter added, rounded to a type of safetensors.

    Raises:
        CheckpointFormatError: A number does not fit into the type.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is refused below
        added_OI = pair.b.astype(np.float32) @ pair.a.astype(np.float32)
        sum_OI = np.ascontiguousarray(base_OI.astype(np.float32) + np.float32(scale) * added_OI)
        rounded: Any = sum_OI.astype(np.float16) if dtype == "F16" else sum_OI
    if not np.isfinite(rounded).all():
        raise CheckpointFormatError(f"{name} has numbers that its type cannot hold")
    if dtype == "BF16":
        rounded = bfloat16_bits(sum_OI)
    return memoryview(rounded.reshape(-1).view(np.uint8))


def _copy_rest(base: Path, folder: Path) -> None:
    """Copy what belongs to the model beside its weights: settings, the tokenizer, the licence."""
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
