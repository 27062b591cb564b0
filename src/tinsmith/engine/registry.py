"""Creates engines by name, importing only the one that is used.

There are two steps: `find_models` resolves models to folders, which may take long because it
downloads missing ones; `make_engine` creates the engine, optionally in a child process.

A model is given as `NAME` or `NAME=PATH_OR_ID`. Several names with the same path are one model: the
first is its name, the others are aliases. A suffix after `:` marks a stand-in; clients ignore it
when they look for tokenizers.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tinsmith.engine.base import Engine
from tinsmith.engine.embedded.embedded_settings import EmbeddedSettings, free_threads
from tinsmith.engine.files.base import ReportProgress
from tinsmith.engine.files.cache import ModelCache, ignore_progress, read_manifest
from tinsmith.engine.files.find import find_model
from tinsmith.engine.files.hub_cache import cached_model
from tinsmith.engine.files.sources import known_name
from tinsmith.engine.fleet.fleet_engine import FleetEngine
from tinsmith.engine.fleet.replica_settings import ReplicaSettings, replica_specs
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource, create_engine
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import ValidationError, shown

__all__ = [
    "ENGINES",
    "ModelSource",
    "check_device",
    "check_installed",
    "find_models",
    "make_engine",
    "read_models",
]

ENGINES = ("embedded", "fake")
LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*(:[A-Za-z0-9][\w.-]*)*", re.ASCII)


def read_models(models: Sequence[str]) -> list[ModelSource]:
    """Parse `NAME` or `NAME=PATH_OR_ID` settings.

    Raises:
        ValidationError: A name is invalid or given twice.
    """
    found: dict[str, ModelSource] = {}
    first_of_path: dict[str, str] = {}
    for text in models:
        name, is_given, path = text.partition("=")
        name = name.strip()
        path = path.strip() if is_given else name.partition(":")[0]
        if not is_given:
            name = known_name(name)  # expand a short name
        _check_model(name, path)
        if name in found:
            raise ValidationError(f"the model name {name!r} is given twice")
        if path.startswith(("~", "./", "../")):
            # Clients load the tokenizer from it, perhaps with another working directory.
            path = str(Path(path).expanduser().absolute())
        found[name] = ModelSource(name, path, first_of_path.get(path))
        first_of_path.setdefault(path, name)
    return list(found.values())


def _check_model(name: str, path: str) -> None:
    """Names occur in ids, paths and logs, so they must look like those of the hub."""
    is_name = len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None
    if not is_name or any(part in (".", "..") for part in name.split("/")):
        raise ValidationError(
            f"{shown(name)} is not a valid model name",
            remedy="pass NAME=PATH_OR_ID, with a name like Qwen/Qwen3-8B or Qwen/Qwen3-8B:tiny",
        )
    if not path or "\0" in path:
        raise ValidationError(f"the model {name} has an invalid path")


def find_models(
    sources: Sequence[ModelSource], cache: ModelCache, report: ReportProgress = ignore_progress
) -> list[ModelSource]:
    """The sources with their folders; missing models are downloaded, which may take minutes.

    Where the files are not those of the hub (the user's own, or converted), the folder is also the
    `tokenizer_id` for clients.

    Raises:
        BaseModelError: There is no such model, or it cannot be downloaded.
    """
    found: dict[str, Path] = {}
    for source in sources:
        if source.path not in found:
            found[source.path] = find_model(source.path, cache, report=report)
    return [_with_folder(source, found[source.path]) for source in sources]


def _with_folder(source: ModelSource, folder: Path) -> ModelSource:
    manifest = read_manifest(folder)
    if manifest is None:  # the user's own, or in the hub's cache
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
    replicas: Sequence[ReplicaSettings] = (),
    folder: Path | None = None,
    silence_s: float = 0.0,
) -> Engine:
    """Create an engine, not opened yet.

    Args:
        name: One of `ENGINES`.
        models: Settings, or the result of `find_models`; real engines need the folders.
        settings: For the embedded engine; the fake one has none.
        has_own_process: Whether it runs in a child process (`process_engine.py`).
        replicas: The replicas of a fleet, each of which runs such an engine in a child process.
        folder: A folder for the files of a fleet; None for a temporary one.
        silence_s: How long a call to a replica may take before it is killed; 0 for no limit.

    Raises:
        ValidationError: There is no such engine, a model name is invalid, or a package that the
            engine needs is not installed.
    """
    texts = [one for one in models if isinstance(one, str)]
    sources = [*read_models(texts), *(one for one in models if not isinstance(one, str))]
    if not sources:
        raise ValidationError("no model is given", remedy="add --model NAME=PATH_OR_ID")
    if name not in ENGINES:
        raise ValidationError(
            f"unknown engine {name!r}", remedy=f"expected one of {', '.join(ENGINES)}"
        )
    check_installed(name)
    settings = settings or EmbeddedSettings()
    if replicas:
        spec = EngineSpec(engine=name, models=tuple(sources), settings=settings)
        return FleetEngine(replica_specs(replicas, spec), folder=folder, silence_s=silence_s)
    if name == "embedded" and not settings.threads:
        # Chosen once: an engine that is opened again must give bit-identical results.
        settings = msgspec.structs.replace(settings, threads=free_threads())
    spec = EngineSpec(engine=name, models=tuple(sources), settings=settings)
    return ProcessEngine(spec) if has_own_process else create_engine(spec)


def check_installed(name: str) -> None:
    """Check that an engine's packages are installed, without importing them.

    Raises:
        ValidationError: One is missing; the message has the command that installs it.
    """
    package, extra = {"embedded": ("torch", "server"), "fake": ("numpy", "numpy")}[name]
    if importlib.util.find_spec(package) is None:
        raise ValidationError(
            f"the engine {name!r} needs {package}, which is not installed",
            remedy=f"run `pip install 'tinsmith[{extra}]'`",
        )


def check_device(device: str) -> None:
    """Check whether CUDA can be available, without importing PyTorch, which takes seconds.

    Raises:
        ValidationError: It is requested and cannot be available. The engine does the full check.
    """
    if not device.startswith("cuda"):
        return
    remedy = "omit --device to use the best device that is available"
    if not _is_built_for_gpus():
        raise ValidationError(
            f"device is {device}, but the installed PyTorch is a CPU-only build",
            remedy=f"install a CUDA build (https://pytorch.org/get-started/locally/), or {remedy}",
        )
    if not any(Path(one).exists() for one in _GPU_DEVICES):
        raise ValidationError(
            f"device is {device}, but this machine has no GPU or no GPU driver",
            remedy=f"check `nvidia-smi`, or {remedy}",
        )


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/nvmap")
"""Device files of drivers: on Linux, in WSL, with ROCm, on Jetson boards."""


def _is_built_for_gpus() -> bool:
    """According to PyTorch's version file; True if that cannot be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # `check_installed` reports that it is missing
    try:
        versions = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^(cuda|hip|rocm)\b.*=\s*['\"]", versions, re.MULTILINE) is not None
