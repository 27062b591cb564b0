"""Which connections a gate closes when there are too many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tinsmith.service.http.connections import (
    ConnectionGate,
    ConnectionLimits,
    ServerConnection,
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

    def open(self, name: str, address: str = "10.0.0.1", tenant: str = "") -> ServerConnection:
        connection = self.gate.admit(address, lambda: self.closed.append(name))
        if tenant:
            connection.authenticate(tenant)
        return connection

    def counts(self) -> tuple[float, ...]:
        """Unauthenticated ones, and the others."""
        return tuple(self.gate.counts.values())


def test_the_longest_idle_connection_of_an_address_is_closed() -> None:
    crowd = Crowd(10, 5, 2)
    first = crowd.open("first")
    crowd.open("second")
    crowd.open("other", "10.0.0.2")
    crowd.gate.set_busy(first, True)
    crowd.gate.set_busy(first, False)
    crowd.now = 5.0

    crowd.open("third")

    assert crowd.closed == ["second"]
    assert crowd.counts() == (3, 0)


def test_a_busy_connection_is_closed_only_if_none_is_idle() -> None:
    crowd = Crowd(10, 5, 2)
    crowd.gate.set_busy(crowd.open("busy"), True)
    crowd.open("idle")
    crowd.now = 5.0

    crowd.gate.set_busy(crowd.open("third"), True)
    assert crowd.closed == ["idle"]
    crowd.open("fourth")

    assert crowd.closed == ["idle", "busy"]


def test_beyond_the_unauthenticated_total_the_largest_address_loses_a_connection() -> None:
    crowd = Crowd(10, 4, 3)
    crowd.open("alone", "10.0.0.2")
    for number in range(3):
        crowd.open(f"many {number}")
    crowd.now = 5.0

    crowd.open("newcomer", "10.0.0.3")

    assert crowd.closed == ["many 0"]
    assert crowd.gate.closed == {"unauthenticated": 1}


def test_clients_that_connect_together_get_time_to_authenticate() -> None:
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


def test_an_authenticated_connection_counts_for_its_tenant_not_its_address() -> None:
    crowd = Crowd(100, 5, 2)
    for number in range(50):
        crowd.open(f"user {number}", tenant="alice")

    assert crowd.closed == []
    assert crowd.counts() == (0, 50)


def test_beyond_the_total_the_largest_tenant_loses_an_idle_connection() -> None:
    crowd = Crowd(8, 4, 4)
    small = crowd.open("bob", tenant="bob")
    for number in range(6):
        crowd.open(f"alice {number}", tenant="alice")

    crowd.open("carol", tenant="carol")

    assert crowd.closed == ["alice 0"]
    assert small.is_authenticated


def test_the_largest_tenant_gets_no_new_connection_if_all_its_own_are_busy() -> None:
    crowd = Crowd(8, 4, 4)
    for number in range(7):
        crowd.gate.set_busy(crowd.open(f"alice {number}", tenant="alice"), True)
    newcomer = crowd.open("newcomer")
    crowd.gate.set_busy(newcomer, True)

    with pytest.raises(TooManyConnectionsError, match=r"limits\.connections") as refused:
        newcomer.authenticate("alice")

    assert refused.value.status_code == 503
    assert (crowd.counts(), crowd.closed) == ((1, 7), [])
    newcomer.authenticate("bob")
    assert crowd.closed == ["alice 6"]


def test_authenticated_connections_always_leave_room_for_new_ones() -> None:
    crowd = Crowd(8, 4, 4)
    for number in range(20):
        crowd.open(f"alice {number}", tenant="alice")
    assert crowd.counts() == (0, 7)
    crowd.open("first", "10.0.0.2")

    crowd.open("second", "10.0.0.3")

    assert crowd.closed[-1] == "first"
    assert crowd.counts() == (1, 7)


def test_a_closed_connection_is_not_counted() -> None:
    crowd = Crowd(8, 4, 4)
    first, second = crowd.open("first"), crowd.open("second", tenant="alice")
    for _ in range(2):
        crowd.gate.forget(first)
        crowd.gate.forget(second)
    first.authenticate("alice")  # a request was still under way

    assert crowd.counts() == (0, 0)


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
def test_clients_are_counted_by_ipv4_address_or_ipv6_network(host: str, group: str) -> None:
    assert address_group(host) == group


def test_the_largest_address_is_found_after_any_connects_and_disconnects() -> None:
    crowd = Crowd(1000, 1000, 1000)
    chosen = random.Random(7)
    opened: list[ServerConnection] = []
    for number in range(2000):
        if opened and chosen.random() < 0.45:
            crowd.gate.forget(opened.pop(chosen.randrange(len(opened))))
        else:
            opened.append(crowd.open(str(number), f"10.0.0.{chosen.randrange(20)}"))
        sizes = Counter(connection.group for connection in opened)
        if opened:
            assert sizes[crowd.gate._strangers.largest()] == max(sizes.values())
    assert crowd.counts() == (len(opened), 0)
