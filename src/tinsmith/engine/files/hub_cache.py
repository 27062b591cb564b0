"""Find models in the cache of `huggingface_hub`, without importing the library."""

from __future__ import annotations

import json
import os
from pathlib import Path

INDEX = "model.safetensors.index.json"


def hub_cache() -> Path:
    """The cache folder of `huggingface_hub`, from the environment variables that it reads."""
    environment = os.environ
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return Path(environment[variable]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def cached_snapshot(name: str, revision: str | None = None) -> Path:
    """The folder of this revision of a repository in the cache; the main branch by default."""
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    revision = revision or "main"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    return repository / "snapshots" / commit


def cached_model(name: str) -> Path | None:
    """The snapshot of a complete model (configuration, tokenizer, all weights), else None.

    A file appears in a snapshot only once it is complete, so every file there can be loaded.
    """
    snapshot = cached_snapshot(name)
    try:
        if (snapshot / INDEX).is_file():
            index = json.loads((snapshot / INDEX).read_text(encoding="utf-8"))
            weights = set(index["weight_map"].values())
        else:
            weights = {"model.safetensors"}
        needed = {"config.json", "tokenizer.json", *weights}
        is_whole = all((snapshot / file).is_file() for file in needed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return snapshot if is_whole else None
