"""Generates modules from proto/tinsmith.proto; see scripts/regenerate-proto.

`tags.py` has the tag of each field (field number and wire type, as written before it on the wire).
The codec uses these, so that a field number is written once, in the .proto file. `tinsmith_pb2.py`
is the protobuf library's own module for the schema; only tests use it.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import tempfile
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto" / "tinsmith.proto"
TAGS = ROOT / "src" / "tinsmith" / "wire" / "generated" / "tags.py"
ORACLE = ROOT / "tests" / "oracle" / "tinsmith_pb2.py"

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
Field = descriptor_pb2.FieldDescriptorProto
WIRE_TYPES: dict[Any, int] = {
    Field.TYPE_DOUBLE: FIXED64,
    Field.TYPE_FLOAT: FIXED32,
    Field.TYPE_STRING: LENGTH_DELIMITED,
    Field.TYPE_BYTES: LENGTH_DELIMITED,
    Field.TYPE_MESSAGE: LENGTH_DELIMITED,
}
HEADER = '''"""Tags of the protobuf fields of proto/tinsmith.proto. Do not edit.

Made by scripts/regenerate-proto. A tag is `field number << 3 | wire type`.
"""

'''


def main() -> int:
    """Write the modules, or with --check compare them with what would be written."""
    parser = argparse.ArgumentParser(description="Generate modules from proto/tinsmith.proto.")
    parser.add_argument("--check", action="store_true", help="fail if they are out of date")
    is_check = parser.parse_args().check
    stale = [
        path.relative_to(ROOT)
        for path, text in made_modules().items()
        if not path.exists() or path.read_text() != text
    ]
    if is_check:
        for path in stale:
            print(f"regenerate-proto: {path} is out of date; run scripts/regenerate-proto")
        return 1 if stale else 0
    for path, text in made_modules().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"regenerate-proto: {', '.join(map(str, stale)) or 'nothing'} changed")
    return 0


def made_modules() -> dict[pathlib.Path, str]:
    """Each module's path and text, from the schema as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc",
            f"--proto_path={PROTO.parent}",
            f"--python_out={folder}",
            f"--descriptor_set_out={folder}/set",
            str(PROTO),
        ]
        if protoc.main(arguments):
            sys.exit("regenerate-proto: protoc refused proto/tinsmith.proto")
        files = descriptor_pb2.FileDescriptorSet()
        files.ParseFromString(pathlib.Path(folder, "set").read_bytes())
        oracle = pathlib.Path(folder, "tinsmith_pb2.py").read_text()
    return {TAGS: tags_module(files.file[0]), ORACLE: oracle}


def tags_module(file: descriptor_pb2.FileDescriptorProto) -> str:
    """The text of tags.py."""
    lines = []
    for enum in file.enum_type:
        lines += [f"{value.name} = {value.number}" for value in enum.value] + [""]
    for message in file.message_type:
        prefix = constant_name(message.name)
        for field in message.field:
            wire_type = WIRE_TYPES.get(field.type, VARINT)
            packable = field.label == Field.LABEL_REPEATED and wire_type != LENGTH_DELIMITED
            tag = field.number << 3 | (LENGTH_DELIMITED if packable else wire_type)
            lines.append(f"{prefix}__{field.name.upper()} = 0x{tag:02X}")
            if packable:  # old writers may leave it unpacked, and readers take both
                unpacked = field.number << 3 | wire_type
                lines.append(f"{prefix}__{field.name.upper()}_UNPACKED = 0x{unpacked:02X}")
        lines.append("")
    return HEADER + "\n".join(lines[:-1]) + "\n"


def constant_name(message: str) -> str:
    """SampledSequence becomes SAMPLED_SEQUENCE."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", message).upper()


if __name__ == "__main__":
    sys.exit(main())
