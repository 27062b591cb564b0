"""The weight files of a Hugging Face folder, and checks whether they can be loaded.

Does not import torch: downloading and merging models use it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.errors import BaseModelFormatError

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files that `transformers` would read; older ones may be beside them.

    Raises:
        BaseModelFormatError: There are none, or some are missing.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise BaseModelFormatError(f"there are no weights (*.safetensors) in {folder}")
    return found


def _indexed(folder: Path) -> list[Path]:
    places = read_object(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
    if not names:
        raise BaseModelFormatError(f"{folder / INDEX} has no weight_map")
    if any(Path(name).name != name for name in names):
        raise BaseModelFormatError(f"{folder / INDEX} names files outside of its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BaseModelFormatError(
            f"{folder} has no {missing[0]}, which {INDEX} names",
            remedy="download the model again",
        )
    return [folder / name for name in names]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        BaseModelFormatError: The file cannot be read or is not a JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise BaseModelFormatError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise BaseModelFormatError(f"{path} is not a JSON object")
    return found


def refuse_quantised(what: str, config: Mapping[str, Any]) -> None:
    """Reject quantised weights, which mean nothing without their scales.

    Args:
        what: The model, for the error message.
        config: The content of its `config.json`.

    Raises:
        BaseModelFormatError: The weights are quantised.
    """
    given = config.get("quantization_config")
    if given:
        kind = given.get("quant_method") if isinstance(given, dict) else None
        raise BaseModelFormatError(
            f"the weights of {what} are quantised ({kind or 'somehow'})",
            remedy="use the original model; docs/models.md lists the supported ones",
        )
