"""Samples that share a request: the body they travel in, and what the answers to them mean."""

from __future__ import annotations

from collections.abc import Iterable

from tinsmith.client.samples.call import SampleCall
from tinsmith.errors import APIStatusError
from tinsmith.types.extensions import SampleManyItem
from tinsmith.wire.failures import status_class
from tinsmith.wire.packed_format import PackedText
from tinsmith.wire.protobuf import Parts

WRAP_BYTES = 64
"""More than a body takes beside its samples and the commas between them."""


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
    asked_ms = item.retry_after_ms
    return status_class(status)(
        f"Error code: {status} - {item.detail or 'refused'}",
        status_code=status,
        retry_after_s=None if asked_ms is None else max(0.0, asked_ms / 1000),
    )
