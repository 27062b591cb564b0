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
from tinsmith.wire.limits import DecodeLimits
from tinsmith.wire.sse import Event, EventDecoder, encode_comment, encode_event

SMALL = DecodeLimits(event_bytes=64)

# Streams made of the pieces that matter, far likelier to hit an edge than random bytes.
WORDS = [b"data", b"event", b"id", b"retry", b":", b": ", b"x", b"12", b"\0"]
LINE_ENDS = [b"\r", b"\n", b"\r\n", b"\n\n"]
UTF8 = [b"\xef\xbb\xbf", b"\xe2\x82\xac", b"\xe2\x80\xa8", b"\xe2\x82", b"\xf0\x9f", b"\xff"]
LINES = [b"data: hi\n", b": comment\r\n", b"id: 7\r", b"retry: 1500\n", b"event: token\n"]
FRAGMENTS = st.sampled_from([*WORDS, *LINE_ENDS, *UTF8, *LINES])
STREAMS = st.lists(FRAGMENTS, max_size=60).map(b"".join) | st.binary(max_size=200)


def decode(*chunks: bytes, limits: DecodeLimits = DecodeLimits()) -> list[Event]:  # noqa: B008  frozen
    decoder = EventDecoder(limits)
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def feed_all(decoder: EventDecoder, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        decoder.feed(chunk)


def single_bytes(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def outcome(chunks: list[bytes], limits: DecodeLimits) -> tuple[list[Event], str, object]:
    """Everything a caller can see of one stream, including whether it was refused."""
    decoder = EventDecoder(limits)
    events: list[Event] = []
    try:
        for chunk in chunks:
            events += decoder.feed(chunk)
        ending: object = decoder.close()
    except BodyTooLargeError:
        ending = "too large"
    return events, decoder.last_event_id, ending


def decode_slowly(stream: bytes) -> tuple[list[Event], str]:
    """The standard's own steps over the whole decoded text, without any thought for size."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    *lines, _unfinished = re.split(r"\r\n|\r|\n", text)
    events, last_id = [], ""
    data, name, new_id, retry = "", "", None, None
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data" and line:
            data += value + "\n"
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            new_id = value
        elif field == "retry" and re.fullmatch("[0-9]{1,15}", value):
            retry = int(value)
        elif not line:
            last_id = last_id if new_id is None else new_id
            if data:
                events.append(
                    Event(data=data[:-1], event=name or "message", id=new_id, retry_ms=retry)
                )
            data, name, new_id, retry = "", "", None, None
    return events, last_id


@given(STREAMS)
def test_s41_fed_byte_by_byte_equals_fed_whole(stream: bytes) -> None:
    limits = DecodeLimits()

    assert outcome(single_bytes(stream), limits) == outcome([stream], limits)


@given(STREAMS, st.data())
def test_s41_where_the_stream_is_cut_makes_no_difference(
    stream: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert (
        outcome(chunks, SMALL) == outcome([stream], SMALL) == outcome(single_bytes(stream), SMALL)
    )


@given(STREAMS)
def test_s41_decoding_follows_the_standard(stream: bytes) -> None:
    decoder = EventDecoder()

    events = decoder.feed(stream)

    assert (events, decoder.last_event_id) == decode_slowly(stream)


EVENT_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"))
EVENTS = st.builds(
    Event,
    data=EVENT_TEXT,
    event=ONE_LINE.filter(bool),
    id=st.none() | ONE_LINE,
    retry_ms=st.none() | st.integers(0, 10**15 - 1),
)


@given(st.lists(EVENTS, max_size=4), EVENT_TEXT)
def test_s41_what_is_encoded_decodes_to_itself(events: list[Event], comment: str) -> None:
    stream = b"".join(encode_comment(comment) + encode_event(event) for event in events)

    decoded = decode(*single_bytes(stream))

    expected = [
        Event(
            data=re.sub("\r\n|\r", "\n", event.data),
            event=event.event,
            id=event.id,
            retry_ms=event.retry_ms,
        )
        for event in events
    ]
    assert decoded == expected


def test_s41_an_event_arrives_with_the_byte_that_ends_it() -> None:
    decoder = EventDecoder()

    assert decoder.feed(b"data: one\n") == []
    assert decoder.feed(b"\n") == [Event(data="one")]
    # A CR ends the line at once; the LF that may follow is not waited for.
    assert decoder.feed(b"data: two\r\n\r") == [Event(data="two")]
    assert decoder.feed(b"\ndata: three\r\r") == [Event(data="three")]


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_s41_every_line_end_counts(line_end: bytes) -> None:
    stream = line_end.join([b"event: token", b"data: a", b"data: b", b"", b"data: c", b"", b""])

    events = decode(stream)

    assert events == [Event(data="a\nb", event="token"), Event(data="c")]


def test_s41_a_crlf_cut_in_two_is_one_line_end() -> None:
    events = decode(b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n")

    assert events == [Event(data="a\nb")]


def test_s41_a_character_cut_in_two_is_whole() -> None:
    stream = "data: €😀\n\n".encode()

    events = decode(*single_bytes(stream))

    assert events == [Event(data="€😀")]


def test_s41_invalid_utf8_becomes_replacement_characters() -> None:
    events = decode(b"data: a\xff\xe2\x82\n\n")

    assert events == [Event(data="a\ufffd\ufffd")]


@pytest.mark.parametrize("cut", range(4))
def test_s41_a_leading_byte_order_mark_is_dropped_once(cut: int) -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"

    events = decode(stream[:cut], stream[cut:])

    assert events == [Event(data="a")]


def test_s41_comments_and_unknown_fields_are_skipped() -> None:
    events = decode(b": hello\n:\nfoo: 1\nDATA: 2\ndatas: 3\ndata : 4\ndata: a\n: x\n\n")

    assert events == [Event(data="a")]


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

    assert events == [Event(data=data)]


def test_s41_an_event_without_data_lines_is_not_dispatched() -> None:
    decoder = EventDecoder()

    events = decoder.feed(b"event: ping\nid: 3\nretry: 20\n\ndata: a\n\n")

    assert events == [Event(data="a")]
    assert decoder.last_event_id == "3"


def test_s41_the_last_event_id_stays_until_replaced() -> None:
    decoder = EventDecoder()

    assert decoder.last_event_id == ""
    assert decoder.feed(b"id: 1\ndata: a\n\ndata: b\n\n") == [
        Event(data="a", id="1"),
        Event(data="b"),
    ]
    assert decoder.last_event_id == "1"
    decoder.feed(b"id: 2\0\ndata: c\n\n")
    assert decoder.last_event_id == "1"
    decoder.feed(b"id: 3\ndata: d\n")
    assert decoder.last_event_id == "1"  # the event is not finished
    decoder.feed(b"\nid\ndata: e\n\n")
    assert decoder.last_event_id == ""


@pytest.mark.parametrize(
    "value", [b"", b"-1", b"1.5", b"1e3", b" 7", b"7 ", "٣".encode(), b"9" * 16, b"9" * 10_000]
)
def test_s41_retry_takes_digits_only(value: bytes) -> None:
    decoder = EventDecoder()

    events = decoder.feed(b"retry: " + value + b"\ndata: a\n\n")

    assert events == [Event(data="a")]  # without a delay


@pytest.mark.parametrize(
    ("stream", "is_cut"),
    [
        (b"", False),
        (b"data: a\n\n", False),
        (b": bye\n", False),
        (b"data: a\n", True),
        (b"data: a\n\ndata", True),
        (b"event: a\n", True),
        (b"id\n", True),
        (b"retry: 0\n", True),
    ],
)
def test_s41_an_unfinished_event_is_dropped_and_said(stream: bytes, is_cut: bool) -> None:
    decoder = EventDecoder()
    decoder.feed(stream)

    assert decoder.close() is is_cut
    assert decoder.close() is False


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
def test_s41_an_event_above_the_limit_is_refused_however_it_is_cut(stream: bytes) -> None:
    for chunks in ([stream], single_bytes(stream)):
        decoder = EventDecoder(SMALL)
        with pytest.raises(BodyTooLargeError, match="64 bytes"):
            feed_all(decoder, chunks)
        with pytest.raises(BodyTooLargeError):
            decoder.feed(b"\n\n")
        assert decoder.close() is False


def test_s41_events_before_the_one_refused_are_delivered() -> None:
    decoder = EventDecoder(SMALL)

    events = decoder.feed(b"data: a\n\n" + b"data: " + b"x" * 100)

    assert events == [Event(data="a")]
    with pytest.raises(BodyTooLargeError):
        decoder.feed(b"")


def test_s41_closing_tells_a_refusal_that_was_not_told() -> None:
    decoder = EventDecoder(SMALL)
    decoder.feed(b"data: a\n\n" + b"data: " + b"x" * 100)

    with pytest.raises(BodyTooLargeError):
        decoder.close()


def test_s41_a_long_stream_of_small_events_and_comments_is_not_refused() -> None:
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
def test_s41_work_grows_with_the_stream_and_not_with_its_square(piece: bytes, repeats: int) -> None:
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
    event = Event(data="a\nb\r\n\rc", event="token", id="7", retry_ms=1500)

    encoded = encode_event(event)

    assert encoded == (b"event: token\nid: 7\nretry: 1500\ndata: a\ndata: b\ndata: \ndata: c\n\n")


def test_a_default_name_is_not_written() -> None:
    assert encode_event(Event(data="")) == b"data: \n\n"


def test_other_separators_stay_inside_their_line() -> None:
    encoded = encode_event(Event(data="a\u2028b\x0bc\x85d"))

    assert encoded == "data: a\u2028b\x0bc\x85d\n\n".encode()


@pytest.mark.parametrize(
    "event",
    [
        Event(data="", event="a\nb"),
        Event(data="", event="a\rb"),
        Event(data="", event=""),
        Event(data="", id="a\nb"),
        Event(data="", id="a\r"),
        Event(data="", id="a\0"),
        Event(data="", retry_ms=-1),
        Event(data="", retry_ms=10**15),
        Event(data="\ud800"),
    ],
)
def test_what_the_format_cannot_carry_is_refused(event: Event) -> None:
    with pytest.raises(ValidationError):
        encode_event(event)


def test_a_comment_cannot_smuggle_an_event() -> None:
    encoded = encode_comment("hi\n\ndata: evil\r\rdata: worse\n\n")

    assert decode(encoded) == []
    assert encode_comment() == b": \n\n"
