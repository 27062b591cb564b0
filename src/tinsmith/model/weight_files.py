"""Which files of a Hugging Face folder hold a model's weights, and whether they can be read.

Without torch: what fetches and merges models asks too.
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
    """Those that `transformers` would read: older ones may lie beside them.

    Raises:
        BaseModelFormatError: There are none, or not all of them.
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
        raise BaseModelFormatError(f"{folder / INDEX} does not tell which files there are")
    if any(Path(name).name != name for name in names):
        raise BaseModelFormatError(f"{folder / INDEX} names files of other folders")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BaseModelFormatError(
            f"{folder} has no {missing[0]}, which {INDEX} names",
            remedy="fetch the whole model again",
        )
    return [folder / name for name in names]


def read_object(path: Path) -> dict[str, Any]:
    """A file with an object in JSON.

    Raises:
        BaseModelFormatError: It has none.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise BaseModelFormatError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise BaseModelFormatError(f"{path} is not a JSON object")
    return found


def refuse_quantised(what: str, config: Mapping[str, Any]) -> None:
    """Read nothing that would mean other numbers without its scales.

    Args:
        what: How the model is called in the error.
        config: What its `config.json` says.

    Raises:
        BaseModelFormatError: The weights are quantised.
    """
    given = config.get("quantization_config")
    if given:
        kind = given.get("quant_method") if isinstance(given, dict) else None
        raise BaseModelFormatError(
            f"the weights of {what} are quantised ({kind or 'somehow'})",
            remedy="take the model that it was made from; docs/models.md says which can be run",
        )
