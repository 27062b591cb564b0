"""Which function calls which public method. A method that is missing here is a failure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from tests.compatibility.caller import Caller
from tests.compatibility.calls import (
    admin_client,
    api_future,
    auth,
    rest_client,
    sampling_client,
    service_client,
    training_client,
    types,
)
from tests.compatibility.stage import Stage

Call = Callable[[Stage, Caller], None]

_MODULES: dict[str, ModuleType] = {
    "ServiceClient": service_client,
    "TrainingClient": training_client,
    "SamplingClient": sampling_client,
    "RestClient": rest_client,
    "AdminClient": admin_client,
    "APIFuture": api_future,
    "auth": auth,
}


def _functions(kind: str, module: ModuleType) -> dict[str, Call]:
    return {
        f"{kind}.{name}": function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith(("_", "check_"))
    }


CALLS: dict[str, Call] = {
    **{
        name: function
        for kind, module in _MODULES.items()
        for name, function in _functions(kind, module).items()
    },
    **types.CALLS,
}
"""By `Class.method`, in the order in which they are run and shown."""
