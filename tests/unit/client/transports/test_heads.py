from __future__ import annotations

import pytest

from tinsmith.client.transports.base import TransportSettings
from tinsmith.client.transports.direct import MOST_KEPT, Heads
from tinsmith.errors import ValidationError
from tinsmith.wire.exchange import HttpRequest


def some_heads(**headers: str) -> Heads:
    return Heads(TransportSettings(base_url="http://host/svc", headers=headers), "host")


def a_request(path: str = "/asample", **once: str) -> HttpRequest:
    return HttpRequest("POST", path, {}, {"Accept": "application/json"}, [b"ab", b"c"], once)


def test_each_request_head_has_its_own_headers_and_idempotency_key() -> None:
    heads = some_heads()

    first = heads.of(a_request(Iteration="0"), "key-0", "tml-a").decode()
    second = heads.of(a_request(Iteration="1"), "key-1", "tml-b").decode()

    assert first.startswith("POST /svc/asample HTTP/1.1\r\nAccept-Encoding: ")
    assert first.endswith("\r\n\r\n")
    assert "\r\nHost: host\r\n" in first
    assert "\r\nContent-Length: 3\r\n" in first
    for number, name in ((first, "0"), (second, "1")):
        assert f"\r\nIteration: {name}\r\n" in number
        assert f"\r\nX-Idempotency-Key: key-{name}\r\n" in number
    assert "X-API-Key: tml-a" in first
    assert "X-API-Key: tml-b" in second


def test_a_default_header_overrides_a_request_s_own() -> None:
    heads = some_heads(iteration="mine")

    head = heads.of(a_request(Iteration="0"), "key", "tml-a").decode()

    assert head.lower().count("iteration:") == 1
    assert "iteration: mine" in head


@pytest.mark.parametrize("name", ["X-Idempotency-Key", "x-idempotency-key"])
def test_a_default_idempotency_key_header_is_ignored(name: str) -> None:
    head = some_heads(**{name: "mine"}).of(a_request(), "key-0", "tml-a").decode()

    assert head.lower().count("x-idempotency-key:") == 1
    assert "X-Idempotency-Key: key-0\r\n" in head


def test_the_cache_of_request_heads_is_bounded() -> None:
    heads = some_heads()

    for number in range(3 * MOST_KEPT):
        assert f"/run-{number} ".encode() in heads.of(a_request(f"/run-{number}"), "k", "tml-a")

    assert len(heads._kept) <= MOST_KEPT


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\n", "a\0"])
def test_no_header_value_can_add_a_line(value: str) -> None:
    with pytest.raises(ValidationError, match="line break"):
        some_heads().of(a_request(Iteration=value), "key", "tml-a")
    with pytest.raises(ValidationError, match="line break"):
        some_heads().of(a_request(), "key", value)
