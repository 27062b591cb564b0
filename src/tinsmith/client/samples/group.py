"""Samples that share a request: the body they travel in, and what the answers to them mean."""

from __future__ import annotations

from collections.abc import Iterable

from tinsmith.client.samples.call import SampleCall
from tinsmith.errors import APIStatusError
from tinsmith.types.extensions import SampleManyItem
from tinsmith.types.inputs import EncodedTextChunk, ModelInput
from tinsmith.wire.failures import status_class
from tinsmith.wire.packed_format import PackedText
from tinsmith.wire.protobuf import Parts
from tinsmith.wire.retry_after import DEFAULT_CAP_S

WRAP_BYTES = 64
"""More than a body takes beside its samples and the commas between them."""
SMALL_PROMPT_BYTES = 131_072
SMALL_PAUSE_S, LARGE_PAUSE_S = 1.0, 5.0
"""How long a 429 that names no delay pauses samples: by the size of the prompt."""
_BYTES_PER_TOKEN = 10


def joined(calls: Iterable[SampleCall]) -> PackedText:
    """The body of `asample_many`, from samples that are written."""
    text: Parts = [b'{"samples":[']
    arrays: Parts = []
    for call in calls:
        assert call.written is not None
        text += [*call.written.text, b","]
        arrays += call.written.arrays
    text[-1] = b"]}"
    return PackedText(text, arrays)


def error_of(item: SampleManyItem) -> APIStatusError:
    """The error that a refused item stands for."""
    status = item.status if item.status is not None else 500
    delay_s = None if item.retry_after_ms is None else item.retry_after_ms / 1000
    return status_class(status)(
        f"Error code: {status} - {item.detail or 'refused'}",
        status_code=status,
        retry_after_s=None if delay_s is None else min(max(0.0, delay_s), DEFAULT_CAP_S),
    )


def pause_s(error: APIStatusError, prompt: ModelInput) -> float:
    """How long samples wait after a 429."""
    if error.retry_after_s is not None:
        return error.retry_after_s
    tokens = sum(chunk.length for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk))
    is_small = tokens * _BYTES_PER_TOKEN <= SMALL_PROMPT_BYTES
    return SMALL_PAUSE_S if is_small else LARGE_PAUSE_S
