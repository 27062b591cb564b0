"""Every public method of the official clients is ours too, and is called in the same way."""

from __future__ import annotations

import inspect
import pathlib
import re
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
def test_methods_have_the_official_signatures(class_name: str, method: str) -> None:
    official = getattr(getattr(tinker, class_name), method)
    ours = getattr(getattr(tinsmith, class_name), method, None)

    assert ours is not None
    assert differences(official, ours) == []
    # Not the official one: where it is marked deprecated, its wrapper is no coroutine function.
    assert inspect.iscoroutinefunction(ours) == method.endswith("_async")


@pytest.mark.parametrize("class_name", OPENED)
def test_client_constructors_have_the_official_signatures(class_name: str) -> None:
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
def test_every_method_has_an_async_variant(class_name: str) -> None:
    cls = getattr(tinsmith, class_name)
    names = [n for n in public_methods(cls) if not n.startswith("iter_") and n != "get_telemetry"]

    lonely = [
        name for name in names if not name.endswith("_async") and f"{name}_async" not in names
    ]

    assert lonely == []


def test_sync_and_async_variants_have_the_same_signature() -> None:
    for class_name in OPENED:
        cls = getattr(tinsmith, class_name)
        for name in public_methods(cls):
            twin = getattr(cls, f"{name}_async", None)
            if twin is not None:
                ours = [(n, p.kind, p.default) for n, p in parameters(twin).items()]
                assert ours == [
                    (n, p.kind, p.default) for n, p in parameters(getattr(cls, name)).items()
                ], f"{class_name}.{name}"


PLAIN = {
    "ServiceClient": {"get_server_capabilities"},
    "TrainingClient": {"get_info", "get_tokenizer"},
    "SamplingClient": {"get_base_model", "get_sampler_handle", "get_tokenizer"},
    "RestClient": set[str](),
    "AdminClient": set[str](),
}
"""Methods that make a request and return a value, as the official ones do."""
WITHOUT_REQUEST = {
    *("create_rest_client", "from_sampler_handle", "get_console_url", "get_telemetry"),
    "on_queue_state_change",
}
OWN_LOOPS = {"sample_many", "sample_as_completed", "sample_stream", "open"}
"""Of ours alone; `open` is a coroutine."""


@pytest.mark.parametrize("class_name", PLAIN)
def test_every_other_request_returns_a_future_that_can_be_awaited(class_name: str) -> None:
    cls = getattr(tinsmith, class_name)
    returned = {
        name: str(inspect.signature(getattr(cls, name)).return_annotation)
        for name in public_methods(cls)
        if not name.endswith("_async") and not name.startswith("iter_")
    }

    plain = {name for name, value in returned.items() if not value.startswith(FUTURES)}

    assert plain - WITHOUT_REQUEST - OWN_LOOPS == PLAIN[class_name]


FUTURES = ("APIFuture[", "TrainingClientFuture", "SamplingClientFuture")


@pytest.mark.parametrize("class_name", PLAIN)
def test_the_page_lists_what_returns_a_plain_value_as_the_official_sdk_does(
    class_name: str,
) -> None:
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "compatibility.md").read_text("utf-8")
    listed = set(re.findall(rf"^\| `{class_name}\.(\w+)` \| `await ", page, re.MULTILINE))

    assert listed == PLAIN[class_name]
    for name in listed:
        official = getattr(getattr(tinker, class_name), name)
        assert "Future" not in str(inspect.signature(official).return_annotation)
