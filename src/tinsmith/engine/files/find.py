"""Resolve the name or path of a base model to the folder with its files."""

from __future__ import annotations

from pathlib import Path

from tinsmith.engine.files.base import ReportProgress
from tinsmith.engine.files.cache import ModelCache, ignore_progress
from tinsmith.engine.files.hub_cache import cached_model
from tinsmith.engine.files.sources import full_name, sources_of
from tinsmith.errors import BaseModelFormatError, BaseModelNotFoundError, ValidationError


def find_model(
    name: str,
    cache: ModelCache,
    *,
    may_fetch: bool = True,
    report: ReportProgress = ignore_progress,
) -> Path:
    """The folder of a base model: a local one, else our cache, else the hub's, else a download.

    Args:
        name: A path, or a hub id. A local folder takes precedence over the hub's model.
        cache: The cache of downloaded models.
        may_fetch: Whether a model that is not on this machine may be downloaded.
        report: Called with the progress of a download.

    Raises:
        BaseModelNotFoundError: There is no such folder or model.
        BaseModelFormatError: The folder does not contain a model.
        BaseModelError: It could not be downloaded; `ModelCache.pull` lists the reasons.
        ValidationError: `name` is neither a path nor a valid hub id.
    """
    is_path = name.startswith(("/", "./", "../", "~"))
    folder = _folder(name)
    if folder is not None and (folder / "config.json").is_file():
        return folder.absolute()
    if folder is not None and (is_path or not _is_kept(name, cache)):
        raise BaseModelFormatError(f"the folder {folder} is not a model: it has no config.json")
    if is_path:
        raise BaseModelNotFoundError(f"there is no folder {name}")
    found = cache.find(name) or cached_model(full_name(name))
    if found is None and may_fetch:
        found = cache.pull(name, sources_of(full_name(name)), report=report)
    if found is None:
        raise BaseModelNotFoundError(
            f"the model {full_name(name)} is not in {cache.folder}",
            remedy=f"run `tinsmith model pull {full_name(name)}`",
        )
    return found


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, unknown user, NUL byte
        return None


def _is_kept(name: str, cache: ModelCache) -> bool:
    """Whether the cache has a model with this name."""
    try:
        return cache.find(name) is not None
    except ValidationError:
        return False
