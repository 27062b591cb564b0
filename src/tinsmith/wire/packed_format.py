"""Samples whose token ids travel as memory: JSON for all that is small, the arrays behind it.

To write 32,768 token ids as decimal text takes two milliseconds, as long as all else that a client
does for a sample ten times over. In this form they are sent as they lie in memory. A body is

    the JSON text's length    four bytes, little-endian, unsigned
    the JSON text             the request, where `{"packed": n}` stands for a list of n token ids
    the arrays                int32, little-endian, one behind the other

The arrays stand in the order in which the text names them, and the body ends with the last. So
they can neither overlap nor leave gaps, whatever a body says. A list may also stand in the text.

Packed bodies are for the routes that take samples, where a service has offered them; see
`docs/extensions.md`. What is decoded is what the same request in JSON decodes to.
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
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import Parts, merged

FEWEST_PACKED = 64
"""A shorter list costs less as text."""
_LENGTH_BYTES = 4
_TOKEN_BYTES = ITEM_BYTES["int32"]


class PackedText(msgspec.Struct, frozen=True):
    """A request, or several that were joined: its JSON text, and the arrays that the text names."""

    text: Parts
    arrays: Parts

    @property
    def size(self) -> int:
        """How many bytes it takes, without the text's length."""
        return sum(map(len, self.text)) + sum(map(len, self.arrays))

    def body(self) -> Parts:
        """The body that holds it. Long arrays are not copied."""
        text = b"".join(self.text)
        return merged([len(text).to_bytes(_LENGTH_BYTES, "little") + text, *self.arrays])


def encode(request: Record | Frozen) -> PackedText:
    """A request, or its prompt, with the token ids set aside; all is text if there are few.

    Raises:
        ValidationError: It holds something that cannot be sent.
    """
    writer = _Writer()
    text = writer.parts(to_plain(request, write_array=writer.write_array))
    return PackedText(text, writer.arrays)


class _Writer(json_format.BodyWriter):
    """Sets token ids aside, which are the arrays of int32; tensors stay text."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: Parts = []

    def write_array(self, numbers: Numbers) -> Any:
        if numbers.kind != "int32" or len(numbers) < FEWEST_PACKED:
            return super().write_array(numbers)
        self.arrays.append(numbers.memory)
        return {"packed": len(numbers)}


def decode(body: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Read a body into dicts and lists, with its arrays as `Numbers` in memory of their own.

    Raises:
        BodyTooLargeError: It could take more memory than `limits` allows.
        DecodeError: Its text is no JSON, its arrays are not as long as it says or belong to no
            chunk of text, or a token id is negative.
    """
    check_size(len(body), limits.memory_bytes)
    memory = memoryview(body)
    start = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
    if start > len(memory):
        raise DecodeError(f"the packed body ends at byte {len(memory)}, inside its JSON text")
    # What is made of the text and the arrays keep to the limit together.
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
    """The chunks of a sample, or of each of many, in order; what is no sample has none."""
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
        raise DecodeError("where token ids are packed, their chunk says how many: a whole number")
    return count


def _tokens(memory: memoryview, start: int, stop: int) -> Numbers:
    if stop > len(memory):
        raise DecodeError(f"the token ids at byte {start} go on past the end of the packed body")
    # Copied, so that the sample that is done last does not hold the prompts of all others.
    held = bytes(memory[start:stop])
    if not held[_TOKEN_BYTES - 1 :: _TOKEN_BYTES].isascii():  # the byte with the sign
        raise DecodeError(f"there is a negative token id among those at byte {start}")
    return Numbers(held, "int32")
