"""Prompts as JSON text, kept for the samples that follow.

The samples of a group are drawn from one `ModelInput`, mostly one after the other. To write 32,768
token ids as text is half of what a sample costs, so the texts of the last long lists are kept.
They are found by the list they were made from, not by its numbers, which would have to be compared:
what is written once costs nothing more.
"""

from __future__ import annotations

from tinsmith.types.buffers import Numbers
from tinsmith.types.requests import SampleRequest
from tinsmith.wire import json_format
from tinsmith.wire.protobuf import Parts

MOST_KEPT_BYTES = 1024 * 1024
"""How much text is kept: five prompts of 32,768 tokens. A longer text is not kept at all."""


class PromptTexts:
    """The texts of one sampler's prompts. For one thread."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        # Each with the numbers that it was made from: as long as those are held, no others have
        # their identity. Those used last come last.
        self._kept: dict[int, tuple[Numbers, Parts]] = {}
        self._kept_bytes = 0

    def encode(self, request: SampleRequest) -> Parts:
        """The request as JSON; raises as `json_format.encode_parts`."""
        return json_format.encode_parts(request, array_text=self._text_of)

    def _text_of(self, numbers: Numbers) -> Parts:
        if numbers.kind != "int32":  # a tensor, which may share memory that changes
            return json_format.array_text(numbers)
        known = self._kept.pop(id(numbers), None)
        if known is not None:
            self._kept[id(numbers)] = known
            return known[1]
        text = json_format.array_text(numbers)
        size = sum(map(len, text))
        if size <= self._most_bytes:
            self._keep(numbers, text, size)
        return text

    def _keep(self, numbers: Numbers, text: Parts, size: int) -> None:
        self._kept_bytes += size
        while self._kept_bytes > self._most_bytes:
            _, oldest = self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= sum(map(len, oldest))
        self._kept[id(numbers)] = (numbers, text)
