"""Which connections a gate closes when there are too many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tinsmith.server.connections import (
    Connection,
    ConnectionGate,
    ConnectionLimits,
    TooManyConnectionsError,
    address_group,
)


class Crowd:
    """Connections of a gate, and which of them it closed."""

    def __init__(self, connections: int, unauthenticated: int, per_address: int) -> None:
        self.closed: list[str] = []
        self.now = 0.0
        self.gate = ConnectionGate(
            ConnectionLimits(
                connections=connections,
                unauthenticated=unauthenticated,
                unauthenticated_per_address=per_address,
                grace_s=5.0,
            ),
            clock=lambda: self.now,
        )

    def open(self, name: str, address: str = "10.0.0.1", tenant: str = "") -> Connection:
        connection = self.gate.admit(address, lambda: self.closed.append(name))
        if tenant:
            connection.authenticate(tenant)
        return connection

    def counts(self) -> tuple[float, ...]:
        """Unauthenticated ones, and the others."""
        return tuple(self.gate.counts.values())


def test_the_longest_idle_of_an_address_is_closed() -> None:
    crowd = Crowd(10, 5, 2)
    first = crowd.open("first")
    crowd.open("second")
    crowd.open("other", "10.0.0.2")
    crowd.gate._set_busy(first, True)
    crowd.gate._set_busy(first, False)
    crowd.now = 5.0

    crowd.open("third")

    assert crowd.closed == ["second"]
    assert crowd.counts() == (3, 0)


def test_a_busy_one_is_closed_only_where_none_is_idle() -> None:
    crowd = Crowd(10, 5, 2)
    crowd.gate._set_busy(crowd.open("busy"), True)
    crowd.open("idle")
    crowd.now = 5.0

    crowd.gate._set_busy(crowd.open("third"), True)
    assert crowd.closed == ["idle"]
    crowd.open("fourth")

    assert crowd.closed == ["idle", "busy"]


def test_beyond_the_total_without_a_key_the_largest_address_gives_one_up() -> None:
    crowd = Crowd(10, 4, 3)
    crowd.open("alone", "10.0.0.2")
    for number in range(3):
        crowd.open(f"many {number}")
    crowd.now = 5.0

    crowd.open("newcomer", "10.0.0.3")

    assert crowd.closed == ["many 0"]
    assert crowd.gate.closed == {"unauthenticated": 1}


def test_clients_that_connect_together_are_given_time_to_show_a_key() -> None:
    """All connections together are the only bound meanwhile."""
    crowd = Crowd(8, 4, 2)
    for number in range(8):
        crowd.open(f"first {number}")
    crowd.now = 4.0
    crowd.open("ninth")
    assert crowd.closed == ["first 0"]

    crowd.now = 5.0
    crowd.open("tenth")

    assert crowd.closed == [f"first {number}" for number in range(8)]
    assert crowd.gate.closed == {"total": 1, "address": 7}


def test_a_connection_with_a_key_counts_for_its_tenant_and_not_for_its_address() -> None:
    crowd = Crowd(100, 5, 2)
    for number in range(50):
        crowd.open(f"user {number}", tenant="alice")

    assert crowd.closed == []
    assert crowd.counts() == (0, 50)


def test_beyond_the_total_the_largest_tenant_gives_an_idle_one_up() -> None:
    crowd = Crowd(8, 4, 4)
    small = crowd.open("bob", tenant="bob")
    for number in range(6):
        crowd.open(f"alice {number}", tenant="alice")

    crowd.open("carol", tenant="carol")

    assert crowd.closed == ["alice 0"]
    assert small.is_authenticated


def test_the_largest_tenant_is_refused_another_where_all_of_its_own_are_busy() -> None:
    crowd = Crowd(8, 4, 4)
    for number in range(7):
        crowd.gate._set_busy(crowd.open(f"alice {number}", tenant="alice"), True)
    newcomer = crowd.open("newcomer")
    crowd.gate._set_busy(newcomer, True)

    with pytest.raises(TooManyConnectionsError, match=r"limits\.connections") as refused:
        newcomer.authenticate("alice")

    assert refused.value.status_code == 503
    assert (crowd.counts(), crowd.closed) == ((1, 7), [])
    newcomer.authenticate("bob")
    assert crowd.closed == ["alice 6"]


def test_authenticated_ones_never_take_the_room_of_newcomers() -> None:
    crowd = Crowd(8, 4, 4)
    for number in range(20):
        crowd.open(f"alice {number}", tenant="alice")
    assert crowd.counts() == (0, 7)
    crowd.open("first", "10.0.0.2")

    crowd.open("second", "10.0.0.3")

    assert crowd.closed[-1] == "first"
    assert crowd.counts() == (1, 7)


def test_a_connection_that_ended_is_not_counted() -> None:
    crowd = Crowd(8, 4, 4)
    first, second = crowd.open("first"), crowd.open("second", tenant="alice")
    crowd.gate.make_known(first, ("10.0.0.1", 1))
    for _ in range(2):
        crowd.gate.forget(first)
        crowd.gate.forget(second)
    first.authenticate("alice")  # a request was still under way

    assert crowd.counts() == (0, 0)
    assert crowd.gate._by_client == {}


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
        ("", "unix"),
    ],
)
def test_an_address_is_one_of_ipv4_or_a_network_of_ipv6(host: str, group: str) -> None:
    assert address_group(host) == group


def test_the_largest_address_is_found_whatever_came_and_went() -> None:
    crowd = Crowd(1000, 1000, 1000)
    chosen = random.Random(7)
    opened: list[Connection] = []
    for number in range(2000):
        if opened and chosen.random() < 0.45:
            crowd.gate.forget(opened.pop(chosen.randrange(len(opened))))
        else:
            opened.append(crowd.open(str(number), f"10.0.0.{chosen.randrange(20)}"))
        sizes = Counter(connection.group for connection in opened)
        if opened:
            assert sizes[crowd.gate._strangers.largest()] == max(sizes.values())
    assert crowd.counts() == (len(opened), 0)
