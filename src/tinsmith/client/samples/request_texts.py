"""Encodes samples as JSON, with a cache of what they share.

A program draws thousands of samples with the same settings, and those of a group from the same
prompt, mostly one after the other. Encoding a prompt of 32,768 token ids is half of what a sample
costs, and encoding the settings as much as a whole short prompt. So the texts of the latest prompts
and settings are cached.

Prompts are looked up by the identity of their chunks, not by their ids, which would have to be
compared; settings by their values. The text of a prompt is kept no longer than the prompt itself,
after which it could not be used. Besides, a megabyte that stays allocated in the middle of a burst
keeps the C library from returning the memory of all of it.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from msgspec.structs import astuple

from tinsmith.types.buffers import LAST_LIST
from tinsmith.types.inputs import EncodedTextChunk, ModelInput, ModelInputChunk
from tinsmith.types.requests import SampleRequest
from tinsmith.wire import json_format, packed_format
from tinsmith.wire.packed_format import PackedText
from tinsmith.wire.protobuf import Parts

MOST_KEPT_BYTES = 1024 * 1024
"""The size of the cache: five prompts of 32,768 tokens. A longer prompt is not cached."""
_BESIDE_TEXT_BYTES = 512
"""What a cached prompt takes in addition to its text."""
MOST_KEPT_SETTINGS = 16

_NOTHING = ModelInput.empty()
_PROMPT = SampleRequest.__struct_fields__.index("prompt")
_PLACE = b'"prompt":{"chunks":[]}'  # unique: inside a string it would be escaped


class EarlyText(NamedTuple):
    """The ids of a chunk as JSON text, encoded before it is sent."""

    chunk: EncodedTextChunk
    ids: bytes


def early_text(prompt: ModelInput) -> EarlyText | None:
    """Encode a prompt from the list that it was made from, if that is still available.

    From any thread. It takes a third of the time of encoding it from memory without numpy.
    """
    chunk = prompt.chunks[0] if len(prompt.chunks) == 1 else None
    if not isinstance(chunk, EncodedTextChunk):
        return None
    values = LAST_LIST.take(chunk.numbers)
    ids = None if values is None else json_format.ids_text(values)
    return None if ids is None else EarlyText(chunk, ids)


class RequestTexts:
    """The encoder of one sampler's requests. For one thread."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        # By the identity of the chunks; those used last come last.
        self._kept: dict[tuple[int, ...], _KeptText] = {}
        self._kept_bytes = 0
        self._settings: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def encode(self, request: SampleRequest, early: EarlyText | None = None) -> Parts:
        """The request as JSON; raises as `json_format.encode_parts`.

        Args:
            request: What to encode.
            early: The result of `early_text` for its prompt.
        """
        before, after = self._around_prompt(request)
        return [before, *self._prompt(request.prompt, early), after]

    def pack(self, request: SampleRequest) -> PackedText:
        """The request with its token ids as raw memory; raises as `packed_format.encode`."""
        before, after = self._around_prompt(request)
        prompt = _packed_prompt(request.prompt)
        return PackedText([before, *prompt.text, after], prompt.arrays)

    # The text before and after the prompt

    def _around_prompt(self, request: SampleRequest) -> tuple[bytes, bytes]:
        fields = astuple(request)
        settings = (*fields[:_PROMPT], *fields[_PROMPT + 1 :])
        try:
            known = self._settings.get(settings)
        except TypeError:  # it contains a list or a tensor, which may change
            return _around(request)
        if known is None:
            known = _around(request)
            if len(self._settings) >= MOST_KEPT_SETTINGS:
                self._settings.clear()
            self._settings[settings] = known
        return known

    # The prompt

    def _prompt(self, prompt: ModelInput, early: EarlyText | None) -> Parts:
        chunks = prompt.chunks.copy()  # a copy: the caller's thread may change the list
        key = tuple(map(id, chunks))
        known = self._kept.pop(key, None)
        text = None if known is None else known.text_if_alive()
        if known is None or text is None:
            self._kept_bytes -= 0 if known is None else known.size
            text = _prompt_text(chunks, early)
            size = _size(text)
            known = _keep(chunks, text, size) if size <= self._most_bytes else None
            if known is None:
                return text
            self._make_room(size)
        self._kept[key] = known
        return text

    def _make_room(self, size: int) -> None:
        self._kept_bytes += size
        while self._kept_bytes > self._most_bytes:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= oldest.size


class _Text:
    """A text that is dropped as soon as one of its chunks is freed, on any thread.

    It does not refer to the weak references of its chunks, which would be a cycle.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Parts) -> None:
        self.parts: Parts | None = parts

    def drop(self, _: object) -> None:
        self.parts = None


class _KeptText(NamedTuple):
    """A text in the cache, with weak references to its chunks."""

    text: _Text
    size: int
    watched: list[weakref.ref[ModelInputChunk]]

    def text_if_alive(self) -> Parts | None:
        """The text, unless its chunks have been freed, and other objects may have their ids.

        Checking that the text was dropped is not enough: at the recursion limit Python skips the
        callback that drops it.
        """
        for chunk in self.watched:
            if chunk() is None:
                return None
        return self.text.parts


def _keep(chunks: list[ModelInputChunk], parts: Parts, size: int) -> _KeptText | None:
    text = _Text(parts)
    drop = text.drop
    try:
        return _KeptText(text, size, [weakref.ref(chunk, drop) for chunk in chunks])
    except TypeError:  # a foreign object among the chunks
        return None


def _size(text: Parts) -> int:
    return _BESIDE_TEXT_BYTES + sum(map(len, text))


def _around(request: SampleRequest) -> tuple[bytes, bytes]:
    text = json_format.encode(request.model_copy(update={"prompt": _NOTHING}))
    before, _, after = text.partition(_PLACE)
    return before + b'"prompt":', after


def _packed_prompt(prompt: ModelInput) -> PackedText:
    """As `packed_format.encode`, with a shortcut for a single text chunk."""
    chunks = prompt.chunks.copy()  # a copy, as above
    if len(chunks) == 1 and isinstance(chunks[0], EncodedTextChunk):
        numbers = chunks[0].numbers
        if (count := len(numbers)) >= packed_format.MIN_PACKED:
            text = b'{"chunks":[{"tokens":{"packed":%d},"type":"encoded_text"}]}' % count
            return PackedText([text], [numbers.memory])
    return packed_format.encode(ModelInput(chunks))


def _prompt_text(chunks: list[ModelInputChunk], early: EarlyText | None) -> Parts:
    if len(chunks) == 1 and isinstance(chunks[0], EncodedTextChunk):  # nearly every one
        if early is not None and early.chunk is chunks[0]:  # the chunks may have changed since
            numbers: Parts = [early.ids]
        else:
            numbers = json_format.numbers_text(chunks[0].numbers)
        return [b'{"chunks":[{"tokens":', *numbers, b',"type":"encoded_text"}]}']
    return json_format.encode_parts(ModelInput(chunks))
