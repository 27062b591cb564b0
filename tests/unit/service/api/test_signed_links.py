"""Signed addresses: ours are taken, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import NotFoundError
from tinsmith.service.api import signed_links
from tinsmith.service.api.signed_links import SignedLink, check, sign, wanted_part

SECRET = b"s" * 32
TICKET = SignedLink("file", "alice", "tinker://r/weights/c", "a.json", 100.0)


def test_a_ticket_round_trips() -> None:
    assert check(sign(TICKET, SECRET), "a.json", SECRET, 99.0) == TICKET


def test_a_ticket_expires() -> None:
    with pytest.raises(NotFoundError, match="expired"):
        check(sign(TICKET, SECRET), "a.json", SECRET, 100.0)


def test_a_ticket_is_valid_for_one_file_only() -> None:
    with pytest.raises(NotFoundError):
        check(sign(TICKET, SECRET), "b.json", SECRET, 0.0)


def test_a_ticket_signed_with_another_secret_is_invalid() -> None:
    with pytest.raises(NotFoundError):
        check(sign(TICKET, b"other"), "a.json", SECRET, 0.0)


def test_a_signature_is_invalid_for_another_body() -> None:
    theirs = sign(TICKET, SECRET).partition(".")[2]
    body = sign(msgspec.structs.replace(TICKET, tenant_id="bob"), b"x").partition(".")[0]

    with pytest.raises(NotFoundError):
        check(f"{body}.{theirs}", "a.json", SECRET, 0.0)


@given(st.text(max_size=60) | st.just("A" * (signed_links.LONGEST + 1)))
def test_arbitrary_text_is_never_a_valid_ticket(text: str) -> None:
    with pytest.raises(NotFoundError):
        check(text, "a.json", SECRET, 0.0)


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("", None),
        ("bytes=0-", (0, 10)),
        ("bytes=0-0", (0, 1)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-500", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-400", (0, 10)),
        ("bytes=-0", ()),
        ("bytes=10-", ()),
        ("bytes=99-100", ()),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=\u0661-\u0662", None),
    ],
)
def test_range_headers_are_parsed_as_http_specifies(
    header: str, part: tuple[int, ...] | None
) -> None:
    assert wanted_part(header, 10) == part


@given(st.text(max_size=30) | st.from_regex(r"bytes=[0-9]*-[0-9]*"), st.integers(0, 10**12))
def test_a_parsed_range_always_lies_within_the_file(header: str, size: int) -> None:
    part = wanted_part(header, size)

    assert not part or 0 <= part[0] < part[1] <= size
