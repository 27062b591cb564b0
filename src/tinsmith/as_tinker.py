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
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tinsmith.errors import TinkerError

PROTOCOL_VERSION = "0.36.0"
"""The release whose names and protocol ours are; programs see it as `tinker.__version__`."""

_PUBLIC_INTERFACES = (
    "tinsmith.client.service",
    "tinsmith.client.training",
    "tinsmith.client.sampling",
    "tinsmith.client.rest",
    "tinsmith.client.futures",
)
_MODULES: dict[str, tuple[str, ...]] = {
    "tinker": ("tinsmith",),
    "tinker.types": ("tinsmith.types",),
    "tinker._exceptions": ("tinsmith.errors",),
    "tinker.lib": (),
    "tinker.lib.public_interfaces": _PUBLIC_INTERFACES,
    "tinker.lib.public_interfaces.service_client": _PUBLIC_INTERFACES,
    "tinker.lib.public_interfaces.training_client": _PUBLIC_INTERFACES,
    "tinker.lib.public_interfaces.sampling_client": _PUBLIC_INTERFACES,
    "tinker.lib.public_interfaces.rest_client": _PUBLIC_INTERFACES,
    "tinker.lib.public_interfaces.api_future": _PUBLIC_INTERFACES,
}
"""Where the names of each module come from."""


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
            "the official tinker package was imported before",
            remedy="call tinsmith.as_tinker() first of all",
        )
    sys.meta_path.insert(0, _Finder())


class _Alias(ModuleType):
    """A module whose names are those of others, looked up when they are used."""

    def __getattr__(self, name: str) -> Any:
        for source in _sources(self.__name__):
            module = importlib.import_module(source)
            if hasattr(module, name):
                value = getattr(module, name)
                setattr(self, name, value)
                return value
        raise AttributeError(f"tinsmith has no {self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        modules = map(importlib.import_module, _sources(self.__name__))
        return sorted({name for module in modules for name in dir(module) if name[0] != "_"})


class _Finder:
    """Finds `tinker` and the modules in it before anybody else does, and makes them.

    A finder and a loader by its methods; the base classes for both would double the import's time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, if its name is one of those that we stand for."""
        del path, target
        is_type_module = fullname.startswith("tinker.types.")
        if fullname not in _MODULES and not is_type_module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An alias, whose names are found when they are used."""
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module what cannot be looked up."""
        if module.__name__ == "tinker":
            module.__dict__.update(__version__=PROTOCOL_VERSION, __title__="tinker")
            importlib.import_module("tinker.types")
            module.__dict__["__all__"] = list(importlib.import_module("tinsmith").__all__)


def _sources(name: str) -> tuple[str, ...]:
    # The official package has a module for each type; any of them finds all of ours.
    return _MODULES.get(name, ("tinsmith.types",))


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
        runpy.run_path(given[0], run_name="__main__")


class _CallableModule(ModuleType):
    """This module, which is also the function of its name: `tinsmith.as_tinker()`."""

    def __call__(self) -> None:
        as_tinker()


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    main()
