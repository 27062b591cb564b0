"""Every name of `tinker.types` is ours too, and each is held against the official one somewhere."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types as python_types
import typing
from typing import Any, get_args, get_origin

import pytest
from tinker import types as official

from tests.contract.test_json_types import MODELS, NAMED
from tinsmith import types as ours

IN_PROTOBUF = {
    "Datum",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SampleResponse",
    "TensorData",
}
"""Held against the official ones in test_protobuf_requests.py and test_protobuf_results.py."""

LITERALS = {name for name, value in NAMED.items() if get_origin(value) is typing.Literal}
UNIONS = {
    name
    for name, value in NAMED.items()
    if get_origin(value) in (typing.Union, python_types.UnionType, typing.Annotated)
}
CONTAINERS = {"LossFnInputs", "LossFnOutput", "ProvenanceSpans"}
TEXT = {"ModelID", "RequestID"}
ENUMS = {name for name, value in NAMED.items() if isinstance(value, enum.EnumType)}


def members(union: Any) -> set[str]:
    """The names of the classes that a union is of, whatever wraps them."""
    if get_origin(union) is typing.Annotated:
        return members(get_args(union)[0])
    if get_origin(union) in (typing.Union, python_types.UnionType):
        return set().union(*(members(member) for member in get_args(union)))
    return {union.__name__}


def test_all_151_names_exist_and_are_our_own_types() -> None:
    assert len(NAMED) == 151
    assert [name for name in NAMED if not hasattr(ours, name)] == []


def test_every_name_is_compared_with_the_official_one_exactly_once() -> None:
    in_json = MODELS.keys() & NAMED.keys()
    kinds = [in_json, IN_PROTOBUF, LITERALS, UNIONS, CONTAINERS, TEXT, ENUMS]

    for name in NAMED:
        assert sum(name in kind for kind in kinds) == 1, name
    assert set().union(*kinds) == set(NAMED)


def test_protobuf_types_are_exactly_the_dataclasses_of_the_official_sdk() -> None:
    found = {name for name, value in NAMED.items() if dataclasses.is_dataclass(value)}

    assert found == IN_PROTOBUF


@pytest.mark.parametrize("name", sorted(LITERALS))
def test_literals_allow_the_same_values(name: str) -> None:
    assert set(get_args(getattr(ours, name))) == set(get_args(NAMED[name]))


@pytest.mark.parametrize("name", sorted(UNIONS))
def test_unions_have_the_same_members(name: str) -> None:
    theirs, mine = members(NAMED[name]), members(getattr(ours, name))

    if name == "OptimizerConfig":
        mine |= {"AdamOptimizerConfig"}  # a subclass of OptimizerConfigBase, so implied
        assert issubclass(ours.AdamOptimizerConfig, ours.OptimizerConfigBase)
    assert mine == theirs


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enums_have_the_same_members(name: str) -> None:
    theirs, mine = NAMED[name], getattr(ours, name)

    assert {member.name: member.value for member in mine} == {
        member.name: member.value for member in theirs
    }


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_containers_have_the_same_element_types(name: str) -> None:
    theirs, mine = NAMED[name], getattr(ours, name)

    assert get_origin(mine) is get_origin(theirs)
    assert [members(arg) for arg in get_args(mine)] == [members(arg) for arg in get_args(theirs)]


@pytest.mark.parametrize("name", sorted(TEXT))
def test_ids_are_strings(name: str) -> None:
    assert getattr(ours, name) is NAMED[name] is str


@pytest.mark.parametrize("name", sorted(IN_PROTOBUF))
def test_constructors_take_the_official_arguments_in_the_official_order(name: str) -> None:
    """Keyword names are the same; so is the order wherever the official type takes positions."""
    theirs = inspect.signature(getattr(official, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    public = [field for field in theirs if not field.startswith("_")]

    assert set(public) <= set(mine)
    positional = [field for field in public if theirs[field].kind is not _KEYWORD_ONLY]
    assert list(mine)[: len(positional)] == positional


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
