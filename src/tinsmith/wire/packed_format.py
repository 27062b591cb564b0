"""The packed format of sample requests: JSON, followed by the token ids as binary arrays.

Formatting 32,768 token ids as decimal text takes two milliseconds, ten times as long as everything
else a client does for a sample. Here they are sent as they are in memory. A body consists of

    the length of the JSON text    four bytes, little-endian, unsigned
    the JSON text                  the request, with `{"packed": n}` for a list of n token ids
    the arrays                     int32, little-endian, one after the other

The arrays are in the order of the text and fill the rest of the body, so they can neither overlap
nor leave gaps. The text may also contain plain lists.

Packed bodies are for the sampling endpoints of services that offer them; see `docs/extensions.md`.
They decode to the same request as plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tinsmith.errors import DecodeError
from tinsmith.types.buffers import ITEM_BYTES, Memory, Numbers
from tinsmith.types.record import Frozen, Record, to_plain
from tinsmith.wire import json_format
from tinsmith.wire.content import check_size
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import Parts, merged

MIN_PACKED = 64
"""Shorter lists are faster as text."""
_LENGTH_BYTES = 4
_TOKEN_BYTES = ITEM_BYTES["int32"]


class PackedText(msgspec.Struct, frozen=True):
    """One or several requests: the JSON text, and the arrays that it refers to."""

    text: Parts
    arrays: Parts

    @property
    def size(self) -> int:
        """The size in bytes, without the length field."""
        return sum(map(len, self.text)) + sum(map(len, self.arrays))

    def body(self) -> Parts:
        """The body. Long arrays are not copied."""
        text = b"".join(self.text)
        return merged([len(text).to_bytes(_LENGTH_BYTES, "little") + text, *self.arrays])


def encode(request: Record | Frozen) -> PackedText:
    """Encode a request, or its prompt; short lists of token ids stay in the text.

    Raises:
        ValidationError: A value cannot be encoded.
    """
    writer = _Writer()
    text = writer.parts(to_plain(request, write_array=writer.write_array))
    return PackedText(text, writer.arrays)


class _Writer(json_format.BodyWriter):
    """Collects token ids, the arrays of int32; tensors stay in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: Parts = []

    def write_array(self, numbers: Numbers) -> Any:
        if numbers.kind != "int32" or len(numbers) < MIN_PACKED:
            return super().write_array(numbers)
        self.arrays.append(numbers.memory)
        return {"packed": len(numbers)}


def decode(body: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Decode a body into dicts and lists, with each array copied into `Numbers`.

    Raises:
        BodyTooLargeError: The result could take more memory than `limits` allows.
        DecodeError: The text is not JSON, the arrays do not match it, or a token id is negative.
    """
    check_size(len(body), limits.memory_bytes)
    memory = memoryview(body)
    start = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
    if start > len(memory):
        raise DecodeError(f"the packed body ends at byte {len(memory)}, inside its JSON text")
    # The text and the arrays share the limit.
    left = DecodeLimits(memory_bytes=limits.memory_bytes - (len(memory) - start))
    plain = json_format.decode_any(memory[_LENGTH_BYTES:start], left)
    for chunk in _chunks(plain):
        tokens = chunk.get("tokens")
        if isinstance(tokens, dict):
            stop = start + _TOKEN_BYTES * _count(tokens)
            chunk["tokens"] = _tokens(memory, start, stop)
            start = stop
    if start < len(memory):
        raise DecodeError(f"{len(memory) - start} bytes of the packed body belong to no chunk")
    return plain


def _chunks(plain: Any) -> Iterator[dict[str, Any]]:
    """The chunks of one or several samples, in order; none if it is not a sample."""
    samples = plain.get("samples") if isinstance(plain, dict) else None
    for sample in samples if isinstance(samples, list) else [plain]:
        prompt = sample.get("prompt") if isinstance(sample, dict) else None
        chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
        for chunk in chunks if isinstance(chunks, list) else ():
            if isinstance(chunk, dict):
                yield chunk


def _count(tokens: dict[str, Any]) -> int:
    count = tokens.get("packed")
    if type(count) is not int or count < 0:
        raise DecodeError("invalid number of packed token ids: expected an integer of at least 0")
    return count


def _tokens(memory: memoryview, start: int, stop: int) -> Numbers:
    if stop > len(memory):
        raise DecodeError(f"the token ids at byte {start} exceed the packed body")
    # Copied, so that one sample does not keep the prompts of the whole batch in memory.
    held = bytes(memory[start:stop])
    if not held[_TOKEN_BYTES - 1 :: _TOKEN_BYTES].isascii():  # the byte with the sign
        raise DecodeError(f"negative token id in the array at byte {start}")
    return Numbers(held, "int32")
