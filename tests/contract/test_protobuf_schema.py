"""Our `.proto` says the same as the official descriptor, message by message and field by field."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from tests.oracle import tinsmith_pb2


def file_of(module: Any) -> descriptor_pb2.FileDescriptorProto:
    made = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(made)
    return made


THEIRS, OURS = file_of(tinker_public_pb2), file_of(tinsmith_pb2)


def field_facts(
    message: descriptor_pb2.DescriptorProto, package: str
) -> dict[str, tuple[object, ...]]:
    """All that the wire depends on: number, type, label, oneof, presence and what it refers to."""
    oneofs = [oneof.name for oneof in message.oneof_decl]
    return {
        field.name: (
            field.number,
            field.type,
            field.label,
            oneofs[field.oneof_index] if field.HasField("oneof_index") else None,
            field.proto3_optional,
            field.type_name.removeprefix(f".{package}."),
            field.options.packed if field.options.HasField("packed") else None,
        )
        for field in message.field
    }


def nested(message: descriptor_pb2.DescriptorProto) -> dict[str, descriptor_pb2.DescriptorProto]:
    return {entry.name: entry for entry in message.nested_type}


def messages(
    file: descriptor_pb2.FileDescriptorProto,
) -> dict[str, descriptor_pb2.DescriptorProto]:
    return {message.name: message for message in file.message_type}


def test_the_schema_has_the_official_syntax_and_messages() -> None:
    assert OURS.syntax == THEIRS.syntax == "proto3"
    assert sorted(messages(OURS)) == sorted(messages(THEIRS))
    assert not THEIRS.extension and not THEIRS.service


@pytest.mark.parametrize("name", sorted(messages(THEIRS)))
def test_messages_have_the_official_fields(name: str) -> None:
    theirs, mine = messages(THEIRS)[name], messages(OURS)[name]

    assert field_facts(mine, OURS.package) == field_facts(theirs, THEIRS.package)
    assert {oneof.name for oneof in mine.oneof_decl} == {oneof.name for oneof in theirs.oneof_decl}


@pytest.mark.parametrize("name", sorted(messages(THEIRS)))
def test_maps_have_the_official_entries(name: str) -> None:
    theirs, mine = nested(messages(THEIRS)[name]), nested(messages(OURS)[name])

    assert sorted(mine) == sorted(theirs)
    for entry in theirs:
        assert mine[entry].options.map_entry == theirs[entry].options.map_entry
        assert field_facts(mine[entry], OURS.package) == field_facts(theirs[entry], THEIRS.package)


def test_enums_have_the_official_values() -> None:
    def values(file: descriptor_pb2.FileDescriptorProto) -> dict[str, dict[str, int]]:
        return {
            enum.name: {value.name: value.number for value in enum.value} for enum in file.enum_type
        }

    assert values(OURS) == values(THEIRS)
