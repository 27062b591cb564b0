"""The public methods of a release of the SDK, or of our client, found by inspection.

A method is named `Class.method`, without the `_async` that its twin for coroutines ends with.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

CLIENTS = (
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "RestClient",
    "AdminClient",
    "APIFuture",
)
"""Every public method of these classes is called."""
COROUTINE = "_async"
PACKAGES = ("tinker", "tinsmith")


def public_methods(sdk: ModuleType) -> set[str]:
    """`Class.method` of the clients, of the top-level types and of `auth`, twins included."""
    found = {
        f"{kind}.{name}"
        for kind in CLIENTS
        for cls in classes(sdk, kind)
        for name in own_names(cls)
    }
    for name in sdk.__all__:
        cls = getattr(sdk, name)
        is_type = inspect.isclass(cls) and not issubclass(cls, BaseException)
        if is_type and name not in CLIENTS:
            found |= {f"{name}.{method}" for method in own_names(cls)}
    auth = getattr(sdk, "auth", None)
    return found | {f"auth.{name}" for name in getattr(auth, "__all__", ())}


def classes(sdk: ModuleType, kind: str) -> list[type]:
    """The class of that name; a future's actual class is found under the name of its base."""
    names = (kind, "AwaitableConcurrentFuture") if kind == "APIFuture" else (kind,)
    found = [getattr(module, name, None) for name in names for module in homes(sdk)]
    return [cls for cls in found if cls is not None]


def homes(sdk: ModuleType) -> list[ModuleType]:
    """Older releases do not export every client at the top."""
    if sdk.__name__ == "tinsmith":
        return [sdk]
    return [
        sdk,
        importlib.import_module("tinker.lib.public_interfaces"),
        importlib.import_module("tinker.lib.public_interfaces.rest_client"),
    ]


def own_names(cls: type) -> set[str]:
    """Methods and properties that the package itself defines, rather than a library below it."""
    return {
        name for name in dir(cls) if not name.startswith("_") and is_ours(getattr(cls, name, None))
    }


def is_ours(value: Any) -> bool:
    function = value.fget if isinstance(value, property) else value
    home = getattr(function, "__module__", None) if callable(function) else None
    return home is not None and home.partition(".")[0] in PACKAGES


def faces(methods: set[str]) -> dict[str, list[str]]:
    """The public names of each method: `forward` has the blocking one and the coroutine."""
    grouped: dict[str, list[str]] = {}
    for method in sorted(methods):
        grouped.setdefault(method.removesuffix(COROUTINE), []).append(method)
    return grouped
