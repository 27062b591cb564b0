"""Signed addresses: ours are taken, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import NotFoundError
from tinsmith.server import tickets
from tinsmith.server.tickets import Ticket, check, sign

SECRET = b"s" * 32
TICKET = Ticket("file", "alice", "tinker://r/weights/c", "a.json", 100.0)


def test_a_ticket_comes_back_as_it_was() -> None:
    assert check(sign(TICKET, SECRET), "a.json", SECRET, 99.0) == TICKET


def test_a_ticket_ends() -> None:
    with pytest.raises(NotFoundError, match="expired"):
        check(sign(TICKET, SECRET), "a.json", SECRET, 100.0)


def test_a_ticket_is_for_one_file() -> None:
    with pytest.raises(NotFoundError):
        check(sign(TICKET, SECRET), "b.json", SECRET, 0.0)


def test_a_ticket_of_another_secret_is_none() -> None:
    with pytest.raises(NotFoundError):
        check(sign(TICKET, b"other"), "a.json", SECRET, 0.0)


def test_a_signature_does_not_cover_another_body() -> None:
    theirs = sign(TICKET, SECRET).partition(".")[2]
    body = sign(msgspec.structs.replace(TICKET, tenant_id="bob"), b"x").partition(".")[0]

    with pytest.raises(NotFoundError):
        check(f"{body}.{theirs}", "a.json", SECRET, 0.0)


@given(st.text(max_size=60) | st.just("A" * (tickets.LONGEST + 1)))
def test_no_text_is_a_ticket(text: str) -> None:
    with pytest.raises(NotFoundError):
        check(text, "a.json", SECRET, 0.0)
