"""Runs programs that were written for `tinker` on tinsmith, unchanged.

Either call `tinsmith.as_tinker()` before the program imports `tinker`, or start the program with
`python -m tinsmith.as_tinker script.py …`. From then on `import tinker`, and the submodules of it
that programs import, give tinsmith's own names. An official package that is installed stays out of
it.

What tinsmith does not have is missing from these modules too: the import of such a name fails and
says so.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pathlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from tinsmith.errors import TinkerError

PROTOCOL_VERSION = "0.36.0"
"""The release whose names and protocol ours are; programs see it as `tinker.__version__`."""

CHILD_PATH = str(pathlib.Path(__file__).resolve().with_name("_child_path"))
"""What spawned processes find `tinker` in; see the module there."""

_PUBLIC_INTERFACES = (
    "tinsmith.client.service",
    "tinsmith.client.training",
    "tinsmith.client.sampling",
    "tinsmith.client.rest",
    "tinsmith.client.futures",
    "tinsmith",
)
_INTERFACE_NAMES = (
    "admin_client",
    "api_future",
    "custom_loss",
    "rest_client",
    "sampling_client",
    "service_client",
    "training_client",
)
_MODULES: dict[str, tuple[str, ...]] = {
    "tinker": ("tinsmith",),
    "tinker.auth": ("tinsmith.auth",),
    "tinker.types": ("tinsmith.types",),
    "tinker.types.shared.untyped_api_future": ("tinsmith.types",),
    "tinker._exceptions": ("tinsmith.errors",),
    "tinker._types": ("tinsmith.client.request_options",),
    "tinker._version": (),
    "tinker.lib": (),
    "tinker.lib.api_future_impl": ("tinsmith.client.waits", "tinsmith.client.futures"),
    "tinker.lib.experimental": ("tinsmith.errors",),
    "tinker.lib.internal_client_holder": (),
    "tinker.lib.queue_state_logger": ("tinsmith.client.waits",),
    "tinker.lib.retry_handler": (),
    "tinker.lib.retryable_exception": (),
    "tinker.lib.public_interfaces": _PUBLIC_INTERFACES,
    **{f"tinker.lib.public_interfaces.{name}": _PUBLIC_INTERFACES for name in _INTERFACE_NAMES},
}
"""Where the names of each module come from."""

_RENAMED: dict[str, tuple[str, str]] = {
    "AwaitableConcurrentFuture": ("tinsmith.client.futures", "APIFuture"),
    "InternalClientHolder": ("tinsmith.client.lease", "SessionLease"),
    "RetryConfig": ("tinsmith", "RetryConfig"),
    "RetryableException": ("tinsmith.errors", "ResultExpiredError"),
}
"""Names below `tinker.lib` that are others' here, or in other places."""

_TYPE_MODULES = frozenset(
    {"billing_usage_request", "current_checkpoint_storage_usage_request", "optimizer", "shared"}
)
"""Modules of `tinker.types` that are not named after a type; each type has one too."""


class AsTinkerError(TinkerError, RuntimeError):
    """`tinker` is in use already, and cannot be replaced any more."""


def as_tinker() -> None:
    """Make `import tinker` give tinsmith, in this process. Doing it again changes nothing.

    Raises:
        AsTinkerError: The official package was imported before.
    """
    loaded = sys.modules.get("tinker")
    if isinstance(loaded, _Alias):
        return
    if loaded is not None:
        raise AsTinkerError(
            "the official tinker package is already imported",
            remedy="call tinsmith.as_tinker() before the first `import tinker`",
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if CHILD_PATH not in sys.path:
        sys.path.insert(1, CHILD_PATH)  # behind the folder of the program itself


class _Alias(ModuleType):
    """A module whose names are those of others, looked up when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return list(self._names())
        if name.startswith("__"):
            raise AttributeError(name)
        value = _found(self.__name__, name)
        setattr(self, name, value)
        return value

    def _names(self) -> Iterator[str]:
        for source in _MODULES.get(self.__name__, ("tinsmith.types",)):
            module = importlib.import_module(source)
            yield from getattr(module, "__all__", ())

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._names()})


def _found(module_name: str, name: str) -> Any:
    """What a name in one of our modules stands for."""
    full_name = f"{module_name}.{name}"
    if _is_ours(full_name):
        return importlib.import_module(full_name)
    if name in _RENAMED and module_name.startswith("tinker.lib"):
        source, real_name = _RENAMED[name]
        return getattr(importlib.import_module(source), real_name)
    for source in _MODULES.get(module_name, ("tinsmith.types",)):
        module = importlib.import_module(source)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"tinsmith has no {full_name}")


def _is_ours(full_name: str) -> bool:
    """Whether there is such a module. The official package has one for each type."""
    if full_name in _MODULES:
        return True
    parent, _, name = full_name.rpartition(".")
    return parent == "tinker.types" and (name in _TYPE_MODULES or _names_a_type(name))


def _names_a_type(module_name: str) -> bool:
    joined = module_name.replace("_", "")
    types = importlib.import_module("tinsmith.types")
    return module_name.islower() and any(joined == name.lower() for name in types.__all__)


class _Finder:
    """Finds `tinker` and the modules in it before anybody else does, and makes them.

    A finder and a loader by its methods; the base classes for both would double the import's time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, if its name is one of those that we stand for."""
        del path, target
        if not _is_ours(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An alias, whose names are found when they are used."""
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module what cannot be looked up."""
        if module.__name__ in ("tinker", "tinker._version"):
            module.__dict__.update(__version__=PROTOCOL_VERSION, __title__="tinker")


def main(arguments: list[str] | None = None) -> None:
    """Run a program, or with -m a module, on tinsmith."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(  # noqa: T201 - this is a command
            "usage: python -m tinsmith.as_tinker [-m MODULE | SCRIPT] [ARGUMENTS]\n\n"
            "Runs a program that was written for tinker on tinsmith, unchanged."
        )
        return
    as_tinker()
    import runpy

    if given[0] == "-m" and len(given) > 1:
        sys.argv = given[1:]
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        sys.path[0] = str(pathlib.Path(given[0]).resolve().parent)  # as `python script.py`
        runpy.run_path(given[0], run_name="__main__")


class _CallableModule(ModuleType):
    """This module, which is also the function of its name: `tinsmith.as_tinker()`."""

    def __call__(self) -> None:
        as_tinker()


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    # By its own name: the program may call `tinsmith.as_tinker()` too, and must meet the same one.
    importlib.import_module("tinsmith.as_tinker").main()
