"""Every public method of the official clients is ours too, and is called in the same way."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import tinker

import tinsmith

CLASSES = [
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "RestClient",
    "AdminClient",
    "APIFuture",
]
OPENED = ["ServiceClient", "RestClient", "AdminClient"]
"""Classes that programs make themselves; the others are given to them."""


def public_methods(cls: type) -> Iterator[str]:
    for name in dir(cls):
        if not name.startswith("_") and callable(getattr(cls, name)):
            yield name


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if name != "self"}


def differences(official: Any, ours: Any) -> list[str]:
    """In what a call that the official function takes would not fit ours."""
    theirs, mine = parameters(official), parameters(ours)
    found = []
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if list(mine)[: len(positional)] != positional:
        found.append(f"positional: {positional} became {list(mine)[: len(positional)]}")
    for name, parameter in theirs.items():
        own = mine.get(name)
        if parameter.kind is parameter.VAR_KEYWORD:
            if not any(p.kind is p.VAR_KEYWORD for p in mine.values()):
                found.append("further keywords are not taken")
        elif own is None:
            found.append(f"{name} is missing")
        elif own.kind is not parameter.kind:
            found.append(f"{name}: {parameter.kind.description} became {own.kind.description}")
        elif parameter.default is not parameter.empty and own.default != parameter.default:
            found.append(f"{name}: default {parameter.default!r} became {own.default!r}")
    for name, own in mine.items():
        is_extra = name not in theirs and own.kind not in (own.VAR_KEYWORD, own.VAR_POSITIONAL)
        if is_extra and (own.kind is not own.KEYWORD_ONLY or own.default is own.empty):
            found.append(f"{name} is new, and more than an optional keyword")
    return found


def cases() -> Iterator[Any]:
    for class_name in CLASSES:
        for method in public_methods(getattr(tinker, class_name)):
            yield pytest.param(class_name, method, id=f"{class_name}.{method}")


@pytest.mark.parametrize(("class_name", "method"), list(cases()))
def test_a_method_is_called_as_the_official_one(class_name: str, method: str) -> None:
    official = getattr(getattr(tinker, class_name), method)
    ours = getattr(getattr(tinsmith, class_name), method, None)

    assert ours is not None
    assert differences(official, ours) == []
    # Not the official one: where it is marked deprecated, its wrapper is no coroutine function.
    assert inspect.iscoroutinefunction(ours) == method.endswith("_async")


@pytest.mark.parametrize("class_name", OPENED)
def test_a_client_is_made_as_the_official_one(class_name: str) -> None:
    official, ours = getattr(tinker, class_name), getattr(tinsmith, class_name)

    assert differences(official.__init__, ours.__init__) == []


@pytest.mark.parametrize(
    "class_name",
    ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"],
)
def test_every_method_that_starts_work_takes_a_timeout(class_name: str) -> None:
    cls = getattr(tinsmith, class_name)
    quick = {
        "get_telemetry",
        "get_console_url",
        "create_rest_client",
        "holder",
        "on_queue_state_change",
        "from_sampler_handle",
        "open",  # for the background loop, where a coroutine has its own way to give up
    }

    lacking = [
        name
        for name in public_methods(cls)
        if name not in quick
        and not name.startswith("iter_")
        and "timeout" not in parameters(getattr(cls, name))
    ]

    assert lacking == []


@pytest.mark.parametrize("class_name", ["RestClient", "AdminClient"])
def test_every_call_has_a_twin_for_coroutines(class_name: str) -> None:
    cls = getattr(tinsmith, class_name)
    names = [n for n in public_methods(cls) if not n.startswith("iter_") and n != "get_telemetry"]

    lonely = [
        name for name in names if not name.endswith("_async") and f"{name}_async" not in names
    ]

    assert lonely == []


def test_the_twins_differ_in_nothing() -> None:
    for class_name in OPENED:
        cls = getattr(tinsmith, class_name)
        for name in public_methods(cls):
            twin = getattr(cls, f"{name}_async", None)
            if twin is not None:
                ours = [(n, p.kind, p.default) for n, p in parameters(twin).items()]
                assert ours == [
                    (n, p.kind, p.default) for n, p in parameters(getattr(cls, name)).items()
                ], f"{class_name}.{name}"
