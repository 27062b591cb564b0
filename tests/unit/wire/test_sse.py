from __future__ import annotations

import itertools
import re
import time
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import BodyTooLargeError, ValidationError
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.sse import EventDecoder, ServerSentEvent, encode_comment, encode_event

SMALL = DecodeLimits(event_bytes=64)

# Streams made of the pieces that matter, far likelier to hit an edge than random bytes.
WORDS = [b"data", b"event", b"id", b"retry", b":", b": ", b"x", b"12", b"\0"]
LINE_ENDS = [b"\r", b"\n", b"\r\n", b"\n\n"]
UTF8 = [b"\xef\xbb\xbf", b"\xe2\x82\xac", b"\xe2\x80\xa8", b"\xe2\x82", b"\xf0\x9f", b"\xff"]
LINES = [b"data: hi\n", b": comment\r\n", b"id: 7\r", b"retry: 1500\n", b"event: token\n"]
FRAGMENTS = st.sampled_from([*WORDS, *LINE_ENDS, *UTF8, *LINES])
STREAMS = st.lists(FRAGMENTS, max_size=60).map(b"".join) | st.binary(max_size=200)


def decode(*chunks: bytes, limits: DecodeLimits = DecodeLimits()) -> list[ServerSentEvent]:  # noqa: B008  frozen
    decoder = EventDecoder(limits)
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def feed_all(decoder: EventDecoder, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        decoder.feed(chunk)


def single_bytes(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def outcome(chunks: list[bytes], limits: DecodeLimits) -> tuple[list[ServerSentEvent], bool]:
    """Everything a caller can see of one stream, including whether it was refused."""
    decoder = EventDecoder(limits)
    events: list[ServerSentEvent] = []
    try:
        for chunk in [*chunks, b""]:
            events += decoder.feed(chunk)
    except BodyTooLargeError:
        return events, True
    return events, False


def decode_slowly(stream: bytes) -> list[ServerSentEvent]:
    """The standard's own steps over the whole decoded text, without any thought for size."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    *lines, _unfinished = re.split(r"\r\n|\r|\n", text)
    events = []
    data, name, new_id = "", "", None
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data" and line:
            data += value + "\n"
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            new_id = value
        elif not line:
            if data:
                events.append(ServerSentEvent(data=data[:-1], event=name or "message", id=new_id))
            data, name, new_id = "", "", None
    return events


@given(STREAMS)
def test_s41_feeding_byte_by_byte_equals_feeding_everything_at_once(stream: bytes) -> None:
    limits = DecodeLimits()

    assert outcome(single_bytes(stream), limits) == outcome([stream], limits)


@given(STREAMS, st.data())
def test_s41_chunk_boundaries_make_no_difference(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert (
        outcome(chunks, SMALL) == outcome([stream], SMALL) == outcome(single_bytes(stream), SMALL)
    )


@given(STREAMS)
def test_s41_decoding_follows_the_standard(stream: bytes) -> None:
    assert decode(stream) == decode_slowly(stream)


EVENT_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"))
EVENTS = st.builds(
    ServerSentEvent,
    data=EVENT_TEXT,
    event=ONE_LINE.filter(bool),
    id=st.none() | ONE_LINE,
)


@given(st.lists(EVENTS, max_size=4))
def test_s41_encoded_events_round_trip(events: list[ServerSentEvent]) -> None:
    stream = b"".join(encode_comment() + encode_event(event) for event in events)

    decoded = decode(*single_bytes(stream))

    expected = [
        ServerSentEvent(
            data=re.sub("\r\n|\r", "\n", event.data),
            event=event.event,
            id=event.id,
        )
        for event in events
    ]
    assert decoded == expected


def test_s41_an_event_arrives_with_the_byte_that_ends_it() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"data: one\n") == []
    assert decoder.feed(b"\n") == [ServerSentEvent(data="one")]
    # A CR ends the line at once; the LF that may follow is not waited for.
    assert decoder.feed(b"data: two\r\n\r") == [ServerSentEvent(data="two")]
    assert decoder.feed(b"\ndata: three\r\r") == [ServerSentEvent(data="three")]


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_s41_every_line_ending_is_recognized(line_end: bytes) -> None:
    stream = line_end.join([b"event: token", b"data: a", b"data: b", b"", b"data: c", b"", b""])

    events = decode(stream)

    assert events == [ServerSentEvent(data="a\nb", event="token"), ServerSentEvent(data="c")]


def test_s41_a_crlf_split_across_chunks_is_one_line_ending() -> None:
    events = decode(b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n")

    assert events == [ServerSentEvent(data="a\nb")]


def test_s41_a_character_split_across_chunks_is_decoded() -> None:
    stream = "data: €😀\n\n".encode()

    events = decode(*single_bytes(stream))

    assert events == [ServerSentEvent(data="€😀")]


def test_s41_invalid_utf8_becomes_replacement_characters() -> None:
    events = decode(b"data: a\xff\xe2\x82\n\n")

    assert events == [ServerSentEvent(data="a\ufffd\ufffd")]


@pytest.mark.parametrize("cut", range(4))
def test_s41_a_leading_byte_order_mark_is_dropped_once(cut: int) -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"

    events = decode(stream[:cut], stream[cut:])

    assert events == [ServerSentEvent(data="a")]


def test_s41_comments_and_unknown_fields_are_skipped() -> None:
    events = decode(b": hello\n:\nfoo: 1\nDATA: 2\ndatas: 3\ndata : 4\ndata: a\n: x\n\n")

    assert events == [ServerSentEvent(data="a")]


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data", ""),
        (b"data:", ""),
        (b"data: ", ""),
        (b"data:x", "x"),
        (b"data:  x", " x"),
        (b"data:\tx", "\tx"),
        (b"data: a:b", "a:b"),
    ],
)
def test_s41_one_space_after_the_colon_is_dropped(line: bytes, data: str) -> None:
    events = decode(line + b"\n\n")

    assert events == [ServerSentEvent(data=data)]


def test_s41_an_event_without_data_lines_is_not_dispatched() -> None:
    events = decode(b"event: ping\nid: 3\nretry: 20\n\ndata: a\n\n")

    assert events == [ServerSentEvent(data="a")]


def test_s41_an_event_has_the_last_valid_id_of_its_own() -> None:
    events = decode(b"id: 1\nid: 2\nid: 3\0\ndata: a\n\ndata: b\n\nid\ndata: c\n\n")

    assert [event.id for event in events] == ["2", None, ""]


@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + b"x" * 59,
        b"data: " + b"x" * 59 + b"\n\n",
        b"data: xxxxxxxxx\n" * 10,
        b"data\n" * 70,
        b":" + b"x" * 64,
        b"id: " + b"x" * 40 + b"\ndata: " + b"x" * 40,
        b"event: " + b"x" * 40 + b"\ndata: " + b"x" * 40,
    ],
    ids=[
        "one line",
        "one event",
        "many lines",
        "many empty lines",
        "comment",
        "id and data",
        "name and data",
    ],
)
def test_s41_an_event_above_the_limit_is_rejected_however_it_is_chunked(stream: bytes) -> None:
    for chunks in ([stream], single_bytes(stream)):
        decoder = EventDecoder(SMALL)
        with pytest.raises(BodyTooLargeError, match="64 bytes"):
            feed_all(decoder, chunks)
        with pytest.raises(BodyTooLargeError):
            decoder.feed(b"\n\n")


def test_s41_events_before_a_rejected_one_are_delivered() -> None:
    decoder = EventDecoder(SMALL)

    events = decoder.feed(b"data: a\n\n" + b"data: " + b"x" * 100)

    assert events == [ServerSentEvent(data="a")]
    with pytest.raises(BodyTooLargeError):
        decoder.feed(b"")


def test_s41_a_long_stream_of_small_events_and_comments_is_accepted() -> None:
    decoder = EventDecoder(SMALL)

    events = [e for _ in range(500) for e in decoder.feed(b": still here\n: and here\ndata: a\n\n")]

    assert len(events) == 500
    # Comments are not kept, so any number of them may follow each other within one event.
    assert decoder.feed(b": still here\n" * 500) == []


def test_s41_memory_stays_near_the_limit() -> None:
    limit_bytes = 30_000
    decoder = EventDecoder(DecodeLimits(event_bytes=limit_bytes))
    piece = b"data\n" * 500

    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            feed_all(decoder, itertools.repeat(piece))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # A growing buffer holds an eighth more than it uses, and two of them for a moment.
    assert peak_bytes < 3 * limit_bytes


@pytest.mark.parametrize(
    ("piece", "repeats"),
    [(b"x" * 16, 5_000), (b"x", 8_000), (b"data: x\n", 5_000), (b"data\r\n", 5_000)],
    ids=["huge line in pieces", "huge line in bytes", "many data lines", "many empty data lines"],
)
def test_s41_decoding_time_is_linear_in_the_stream_length(piece: bytes, repeats: int) -> None:
    def fastest_s(count: int) -> float:
        return min(_feed_s(piece, count) for _ in range(3))

    ratio = fastest_s(8 * repeats) / fastest_s(repeats)

    # Linear work gives 8; copying or scanning again what is already held gives 64.
    assert ratio < 30


def _feed_s(piece: bytes, count: int) -> float:
    decoder = EventDecoder()
    decoder.feed(b"data: ")
    start_s = time.process_time()
    for _ in range(count):
        decoder.feed(piece)
    decoder.feed(b"\n\n")
    return time.process_time() - start_s


def test_an_event_is_written_field_by_field() -> None:
    event = ServerSentEvent(data="a\nb\r\n\rc", event="token", id="7")

    encoded = encode_event(event)

    assert encoded == (b"event: token\nid: 7\ndata: a\ndata: b\ndata: \ndata: c\n\n")


def test_a_default_name_is_not_written() -> None:
    assert encode_event(ServerSentEvent(data="")) == b"data: \n\n"


def test_other_unicode_line_separators_are_kept_in_the_data() -> None:
    encoded = encode_event(ServerSentEvent(data="a\u2028b\x0bc\x85d"))

    assert encoded == "data: a\u2028b\x0bc\x85d\n\n".encode()


@pytest.mark.parametrize(
    "event",
    [
        ServerSentEvent(data="", event="a\nb"),
        ServerSentEvent(data="", event="a\rb"),
        ServerSentEvent(data="", event=""),
        ServerSentEvent(data="", id="a\nb"),
        ServerSentEvent(data="", id="a\r"),
        ServerSentEvent(data="", id="a\0"),
        ServerSentEvent(data="\ud800"),
    ],
)
def test_values_that_the_format_cannot_represent_are_rejected(event: ServerSentEvent) -> None:
    with pytest.raises(ValidationError):
        encode_event(event)


def test_a_comment_is_not_an_event() -> None:
    assert encode_comment() == b": \n\n"
    assert decode(encode_comment()) == []
