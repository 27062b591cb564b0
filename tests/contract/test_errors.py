"""Refusals become the errors that the official SDK raises for them, with the same message."""

from __future__ import annotations

import functools
import types as python_types
from typing import Any

import httpx
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker._client import AsyncTinker

from tests.contract.strategies import contract
from tinsmith import errors
from tinsmith.wire.failures import error_from_reply, is_retried, status_class

STATUSES = [*range(400, 432), 451, 499, 500, 502, 503, 504, 599]


def official_error(status: int, body: bytes) -> tinker.APIStatusError:
    """The error that the official HTTP layer makes of a reply."""
    response = httpx.Response(status, content=body, request=httpx.Request("POST", "http://x/"))
    client: Any = python_types.SimpleNamespace(
        _make_status_error=functools.partial(AsyncTinker._make_status_error, None)  # type: ignore[arg-type]  # self is not used
    )
    return AsyncTinker._make_status_error_from_response(client, response)


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_the_official_class(status: int) -> None:
    theirs, mine = official_error(status, b"{}"), error_from_reply(status, {}, b"{}")

    assert type(mine).__name__ == type(theirs).__name__
    assert mine.status_code == theirs.status_code == status
    assert status_class(status) is type(mine)


JSON_BODIES = [b"{}", b'{"detail": "no"}', b"[1, null]", b"null", b"1.5", b' {"a": "\xc3\xa4"}\n']


@contract
@given(
    st.sampled_from([b"", b" \n", *JSON_BODIES])
    | st.text(max_size=20).map(lambda text: f"<{text}".encode())
)
def test_messages_are_the_official_ones(body: bytes) -> None:
    """But that ours shows the sentence in a body, and not the body with it."""
    theirs, mine = official_error(404, body), error_from_reply(404, {}, body)

    assert mine.message == theirs.message.replace("{'detail': 'no'}", "no")


def test_official_error_names_form_the_same_class_hierarchy() -> None:
    """Code that catches an official class catches ours under the same name."""
    theirs = {
        name: cls
        for name, cls in list(vars(tinker).items())  # loading a class adds to it
        if isinstance(cls, type) and issubclass(cls, tinker.TinkerError)
    }

    assert len(theirs) >= 14
    for name, cls in theirs.items():
        mine = getattr(errors, name)
        parents = {base.__name__ for base in cls.__mro__ if base.__name__ in theirs}
        assert parents <= {base.__name__ for base in mine.__mro__}, name


def test_official_clients_retry_the_same_statuses() -> None:
    """A permanent refusal under one of these makes every client spin."""
    client: Any = python_types.SimpleNamespace()

    for status in STATUSES:
        response = httpx.Response(status)
        assert is_retried(status) == AsyncTinker._should_retry(client, response), status
