"""Streams of tokens that are cut or held back after so many tokens.

The service sends as many tokens in one event as there are. Where a rule strikes, events are split
so that each has one token, and the rule takes effect at the token that it names.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

from tinsmith.testing.faults import StreamFault


async def struck_stream(
    pieces: AsyncIterator[bytes], faults: list[StreamFault]
) -> AsyncIterator[bytes]:
    """The events of a stream, until a rule cuts it.

    Raises:
        ConnectionResetError: A rule cuts the stream; half of the next event was sent.
    """
    sent, waiting = 0, b""
    async for piece in pieces:
        waiting += piece
        *events, waiting = waiting.split(b"\n\n")
        for event in events:
            for single in _single_tokens(event + b"\n\n"):
                is_counted = b"event: tokens" in single or b"event: result" in single
                for fault in faults if is_counted else ():
                    if fault.after_tokens == sent:
                        if fault.hold is not None:
                            await fault.hold.wait_released()
                        if fault.cut:
                            yield single[: len(single) // 2]
                            raise ConnectionResetError
                yield single
                sent += is_counted
    yield waiting


def _single_tokens(event: bytes) -> Iterator[bytes]:
    """An event as one event for each of its tokens; others as they are."""
    fields = dict(line.partition(": ")[::2] for line in event.decode().splitlines() if line)
    data = json.loads(fields["data"]) if fields.get("event") == "tokens" else {}
    if len(data.get("tokens", ())) < 2:
        yield event
        return
    counts = [int(count) for count in fields["id"].split(".")]
    index, offset, tokens = data["index"], data["offset"], data["tokens"]
    for place, token in enumerate(tokens):
        counts[index] = offset + place + 1
        is_last = place + 1 == len(tokens)
        single = {
            **data,
            "offset": offset + place,
            "tokens": [token],
            "logprobs": data.get("logprobs") and data["logprobs"][place : place + 1],
            "stop_reason": data.get("stop_reason") if is_last else None,
        }
        name = ".".join(map(str, counts))
        yield f"event: tokens\nid: {name}\ndata: {json.dumps(single)}\n\n".encode()
