"""Prints the public surface of the `tinker` that this interpreter imports, as JSON.

    python tests/compatibility/dump_surface.py

A map from each public name to its parameters: of functions and methods those of their signature, of
classes those of their constructor, which for a type are its fields. Other names, such as aliases
and properties, have an empty list.

Uses the standard library alone, since it runs in environments without tinsmith.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

SUBMODULES = ("types", "auth")
"""Modules below `tinker` whose names are public too."""


def surface(package: ModuleType) -> dict[str, list[str]]:
    """Every public name of the package, of its public modules and of their classes."""
    found: dict[str, list[str]] = {}
    modules = [package, *(getattr(package, name, None) for name in SUBMODULES)]
    for module in filter(None, modules):
        for name in exported(module):
            value = getattr(module, name, None)
            found[f"{module.__name__}.{name}"] = parameters(value)
            if inspect.isclass(value) and is_own(value, package):
                found.update(members(f"{module.__name__}.{name}", value, package))
    return found


def exported(module: ModuleType) -> list[str]:
    """The names in `__all__`; without it, those that do not start with an underscore."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    below = {one.name for one in pkgutil.iter_modules(getattr(module, "__path__", []))}
    return sorted(name for name in vars(module) if not name.startswith("_") and name not in below)


def members(prefix: str, cls: type, package: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """Methods and properties that the package defines, rather than a library below it."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if callable(function) and is_own(function, package):
            yield f"{prefix}.{name}", parameters(getattr(cls, name))


def is_own(value: Any, package: ModuleType) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == package.__name__


def parameters(value: Any) -> list[str]:
    """The names of its parameters."""
    if not callable(value):
        return []
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # an alias, or a function in C
        return []
    return [str(one.name) for one in found if one.name != "self"]


def main() -> None:
    import tinker

    json.dump({"release": tinker.__version__, "surface": surface(tinker)}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
