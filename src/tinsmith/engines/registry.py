"""Makes the engine that settings name, and imports nothing of the others.

It comes in two steps: `find_models` leads from names to folders and may take long, because it
fetches what is not here; `make_engine` makes the engine of them, in a process of its own if asked.

A model is given as `NAME` or `NAME=PATH_OR_ID`. Two names of one path are names of one model: the
first is the model, the others are its aliases. What is after a `:` in a name says that it is a
stand-in; clients ignore it when they look for tokenizers.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tinsmith.engines.base import Engine
from tinsmith.engines.child import ChildEngine
from tinsmith.engines.embedded.settings import EmbeddedModel, EmbeddedSettings, free_threads
from tinsmith.errors import ValidationError, shown
from tinsmith.model_files.base import Tell
from tinsmith.model_files.cache import ModelCache, tell_nobody
from tinsmith.model_files.find import find_model
from tinsmith.model_files.hub_cache import cached_model
from tinsmith.model_files.manifest import read_manifest
from tinsmith.model_files.sources import known_name

ENGINES = ("embedded", "fake")
LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*(:[A-Za-z0-9][\w.-]*)*", re.ASCII)


class ModelSource(msgspec.Struct, frozen=True):
    """A name and where its model comes from."""

    name: str
    path: str
    alias_of: str | None = None
    """The first name with the same path, if this is another one."""
    folder: str | None = None
    """Where its files are, once they were found."""
    tokenizer: str | None = None
    hub_id: str | None = None
    """What the hub calls it, if that is known."""

    @property
    def tokenizer_id(self) -> str:
        """What a client loads the tokenizer by."""
        return self.tokenizer or self.path


def read_models(models: Sequence[str]) -> list[ModelSource]:
    """What each of the settings says.

    Raises:
        ValidationError: A name cannot be used or is given twice.
    """
    found: dict[str, ModelSource] = {}
    first_of_path: dict[str, str] = {}
    for text in models:
        name, is_given, path = text.partition("=")
        name = name.strip()
        path = path.strip() if is_given else name.partition(":")[0]
        if not is_given:
            name = known_name(name)  # as programs call it
        _check_model(name, path)
        if name in found:
            raise ValidationError(f"the model's name {name!r} is given twice")
        if path.startswith(("~", "./", "../")):
            # Clients are told it, to load the tokenizer from; they may have another folder.
            path = str(Path(path).expanduser().absolute())
        found[name] = ModelSource(name, path, first_of_path.get(path))
        first_of_path.setdefault(path, name)
    return list(found.values())


def _check_model(name: str, path: str) -> None:
    """Names go into ids, paths and logs; they are held to what those of the hub look like."""
    is_name = len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None
    if not is_name or any(part in (".", "..") for part in name.split("/")):
        raise ValidationError(
            f"{shown(name)} cannot be a model's name",
            remedy="give NAME=PATH_OR_ID, with a name like Qwen/Qwen3-8B or Qwen/Qwen3-8B:tiny",
        )
    if not path or "\0" in path:
        raise ValidationError(f"the model {name} has no path that can be used")


def find_models(
    sources: Sequence[ModelSource], cache: ModelCache, tell: Tell = tell_nobody
) -> list[ModelSource]:
    """The same with their folders; a model that is not here is fetched, which may take minutes.

    Clients are told the folder as the place of the tokenizer where the files are not those of the
    hub: they are the user's own, or were converted because there was no hub.

    Raises:
        BaseModelError: There is no such model, or it cannot be fetched.
    """
    found: dict[str, Path] = {}
    for source in sources:
        if source.path not in found:
            found[source.path] = find_model(source.path, cache, tell=tell)
    return [_with_folder(source, found[source.path]) for source in sources]


def _with_folder(source: ModelSource, folder: Path) -> ModelSource:
    manifest = read_manifest(folder)
    if manifest is None:  # the user's own, or of the hub's own cache
        is_of_hub = folder == cached_model(known_name(source.path))
        hub_id = known_name(source.path) if is_of_hub else None
    else:
        is_of_hub = "commit" in manifest.source
        hub_id = manifest.name
    tokenizer = hub_id if is_of_hub else str(folder)
    return msgspec.structs.replace(source, folder=str(folder), tokenizer=tokenizer, hub_id=hub_id)


def make_engine(
    name: str,
    models: Sequence[str | ModelSource],
    settings: EmbeddedSettings | None = None,
    *,
    has_own_process: bool = False,
) -> Engine:
    """An engine that is not open yet.

    Args:
        name: One of `ENGINES`.
        models: As settings give them, or as `find_models` does. Real engines need their folders.
        settings: How the embedded engine computes; the fake one has none.
        has_own_process: Whether it runs in a process of its own (`child.py`).

    Raises:
        ValidationError: There is no such engine, a model's name cannot be read, or a package that
            the engine needs is not installed.
    """
    texts = [one for one in models if isinstance(one, str)]
    sources = [*read_models(texts), *(one for one in models if not isinstance(one, str))]
    if not sources:
        raise ValidationError("no model is given", remedy="add --model NAME=PATH_OR_ID")
    if name not in _MAKERS:
        raise ValidationError(
            f"there is no engine {name!r}", remedy=f"known are {', '.join(ENGINES)}"
        )
    check_installed(name)
    settings = settings or EmbeddedSettings()
    if name == "embedded" and not settings.threads:
        # Chosen once: an engine that is opened anew must give the same numbers to the last bit.
        settings = msgspec.structs.replace(settings, threads=free_threads())
    make = functools.partial(_MAKERS[name], sources, settings)
    return ChildEngine(make, name) if has_own_process else make()


def check_installed(name: str) -> None:
    """Look whether an engine's packages are here, without loading them.

    Raises:
        ValidationError: One is not; the message names the command that installs it.
    """
    package, extra = {"embedded": ("torch", "server"), "fake": ("numpy", "numpy")}[name]
    if importlib.util.find_spec(package) is None:
        raise ValidationError(
            f"the engine {name!r} needs {package}, which is not installed",
            remedy=f"pip install 'tinsmith[{extra}]'",
        )


def check_device(device: str) -> None:
    """Look whether CUDA can be there, if it is asked for; loads no PyTorch, which takes seconds.

    Raises:
        ValidationError: It cannot. That it is there after all, the engine finds out.
    """
    if device != "cuda":
        return
    remedy = "omit --device to use the best device that is available"
    if not _is_built_for_gpus():
        raise ValidationError(
            "device is cuda, but the installed PyTorch is a CPU-only build",
            remedy=f"install a CUDA build (https://pytorch.org/get-started/locally/), or {remedy}",
        )
    if not any(Path(one).exists() for one in _GPU_DEVICES):
        raise ValidationError(
            "device is cuda, but this machine has no GPU, or no driver is loaded for it",
            remedy=f"see what `nvidia-smi` says, or {remedy}",
        )


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/nvmap")
"""One of them is there where a driver is: on Linux, in WSL, with ROCm, on Jetson boards."""


def _is_built_for_gpus() -> bool:
    """What PyTorch's own list of versions says; True where that cannot be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # that it is missing is told by `check_installed`
    try:
        versions = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^(cuda|hip|rocm)\b.*=\s*['\"]", versions, re.MULTILINE) is not None


def _embedded(sources: Sequence[ModelSource], settings: EmbeddedSettings) -> Engine:
    from tinsmith.engines.embedded.engine import EmbeddedEngine

    models = [
        EmbeddedModel(
            name=one.name,
            folder=Path(one.folder or one.path),
            tokenizer_id=one.tokenizer_id,
            alias_of=one.alias_of,
            source=one.hub_id,
        )
        for one in sources
    ]
    return EmbeddedEngine(models, settings)


def _fake(sources: Sequence[ModelSource], _: EmbeddedSettings) -> Engine:
    from tinsmith.engines.fake.engine import FakeEngine, fake_model

    return FakeEngine([fake_model(one.name, one.tokenizer_id, one.alias_of) for one in sources])


_MAKERS = {"embedded": _embedded, "fake": _fake}
