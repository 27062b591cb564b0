"""From what a user calls a base model to the folder with its files."""

from __future__ import annotations

from pathlib import Path

from tinsmith.errors import BaseModelFormatError, BaseModelNotFoundError, ValidationError
from tinsmith.model_files.base import Tell
from tinsmith.model_files.cache import ModelCache, tell_nobody
from tinsmith.model_files.hub_cache import cached_model
from tinsmith.model_files.sources import full_name, sources_of


def find_model(
    name: str, cache: ModelCache, *, may_fetch: bool = True, tell: Tell = tell_nobody
) -> Path:
    """The folder of a base model: a local one, one of our cache or of the hub's, else fetched.

    Args:
        name: A path, or a name as on the hub. A folder of that name goes before the hub's model.
        cache: Where fetched models are kept.
        may_fetch: Whether to go to the network for a model that is not here.
        tell: Called with the progress of fetching.

    Raises:
        BaseModelNotFoundError: There is no such folder or model.
        BaseModelFormatError: The folder holds no model.
        BaseModelError: It could not be fetched; see `ModelCache.pull`.
        ValidationError: It is neither a path nor a name.
    """
    is_path = name.startswith(("/", "./", "../", "~"))
    folder = _folder(name)
    if folder is not None and (folder / "config.json").is_file():
        return folder.absolute()
    if folder is not None and (is_path or not _is_kept(name, cache)):
        raise BaseModelFormatError(f"the folder {folder} has no config.json; it is no model")
    if is_path:
        raise BaseModelNotFoundError(f"there is no folder {name}")
    found = cache.find(name) or cached_model(full_name(name))
    if found is None and may_fetch:
        found = cache.pull(name, sources_of(full_name(name)), tell=tell)
    if found is None:
        raise BaseModelNotFoundError(
            f"the model {full_name(name)} is not in {cache.folder}",
            remedy=f"`tinsmith model pull {full_name(name)}` fetches it",
        )
    return found


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, of a user that is not there, with NUL
        return None


def _is_kept(name: str, cache: ModelCache) -> bool:
    """Whether the cache has a model of that name."""
    try:
        return cache.find(name) is not None
    except ValidationError:
        return False
