"""The connection gate: limits per address and in total, before and after authentication.

A connection is unauthenticated until a request on it has shown a valid credential. Unauthenticated
connections are limited per address and in total; where there are too many, the longest idle ones
are closed, so that a new client always has a chance to show its key. Connections that have just
been opened are spared, because clients that start together connect together; only the limit of all
connections applies to them too. Authenticated ones are limited in total only: behind a NAT or a
proxy all users share one address. Where there are too many, one of the tenant with the most is
closed.

This module only counts. `server.py` admits what a listening socket accepts, `protocol.py` reports
when a connection is opened and lost, and `edge.py` which ones are busy and whose credential was
shown.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import time
from collections import Counter
from collections.abc import Callable

from tinsmith.errors import APIStatusError

UNIX = "unix"
"""The address of all clients on a Unix socket."""
_UNAVAILABLE = 503
_KEPT_FOR_NEWCOMERS = 8
"""Of all connections, one in this many stays free of authenticated ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The most connections that may be open at once."""

    connections: int = 10_000
    unauthenticated: int = 2048
    unauthenticated_per_address: int = 1024
    grace_s: float = 5.0
    """How long an unauthenticated connection may be idle before its two limits apply to it."""

    def within(self, connections: int) -> ConnectionLimits:
        """These limits, reduced for a process that can have no more connections than this."""
        total = max(_KEPT_FOR_NEWCOMERS, min(self.connections, connections))
        return ConnectionLimits(
            connections=total,
            unauthenticated=max(1, min(self.unauthenticated, total // 2)),
            unauthenticated_per_address=max(
                1, min(self.unauthenticated_per_address, total * 3 // 8)
            ),
            grace_s=self.grace_s,
        )


class TooManyConnectionsError(APIStatusError):
    """503: the service has reached its limit of connections, most of them of this tenant."""

    default_status = _UNAVAILABLE


class ServerConnection:
    """One open connection. Made by `ConnectionGate.admit`.

    Attributes:
        close: Closes it at once. The acceptor sets this, then `opened`.
        group: The address that it came from, or the tenant that it belongs to.
        is_body_next: Whether the next write is an answer's head, and the one after it its body.
        is_open: Whether it has a protocol; a TLS handshake comes before.
        since: When it was accepted, or became busy or idle.
    """

    __slots__ = (
        "_gate",
        "close",
        "group",
        "is_authenticated",
        "is_body_next",
        "is_busy",
        "is_open",
        "since",
    )

    def __init__(self, gate: ConnectionGate, address: str, close: Callable[[], None]) -> None:
        self._gate = gate
        self.close = close
        self.group = address
        self.is_authenticated = False
        self.is_body_next = False
        self.is_busy = False
        self.is_open = False
        self.since = 0.0

    def opened(self, close: Callable[[], None]) -> None:
        """Its protocol has begun; `close` closes it at once from now on."""
        self.is_open = True
        self.close = close

    def lost(self) -> None:
        """It is closed. May be called again."""
        self._gate.forget(self)

    def set_busy(self, is_busy: bool) -> None:
        """A request on it is being answered, or was."""
        self._gate.set_busy(self, is_busy)

    def authenticate(self, tenant_id: str) -> None:
        """A request on it has shown a credential of this tenant.

        Raises:
            TooManyConnectionsError: There is no room for another connection of this tenant.
        """
        if not self.is_authenticated or self.group != tenant_id:
            self._gate.authenticate(self, tenant_id)


class ConnectionGate:
    """Counts connections and closes those that are too many. For one event loop.

    Attributes:
        limits: What is allowed.
        closed: How many connections were closed for a limit, by the limit: `address`,
            `unauthenticated` or `total`.
    """

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.limits = limits or ConnectionLimits()
        self.closed: Counter[str] = Counter()
        self._strangers = _Pool()
        self._tenants = _Pool()

    @property
    def counts(self) -> dict[tuple[str, ...], float]:
        """How many are open, in the form of a metric with one label."""
        return {
            ("unauthenticated",): float(self._strangers.count),
            ("authenticated",): float(self._tenants.count),
        }

    @property
    def closed_counts(self) -> dict[tuple[str, ...], float]:
        """`closed`, in the form of a metric with one label."""
        return {(limit,): float(count) for limit, count in self.closed.items()}

    # For the acceptor

    def admit(self, host: str, close: Callable[[], None]) -> ServerConnection:
        """Count an accepted connection, and make room for it by closing others."""
        connection = ServerConnection(self, address_group(host), close)
        connection.since = self._clock()
        strangers, limits = self._strangers, self.limits
        excess = strangers.size(connection.group) + 1 - limits.unauthenticated_per_address
        self._close_overdue(connection.group, excess, "address")
        excess = strangers.count + 1 - limits.unauthenticated
        if excess > 0:
            self._close_overdue(strangers.largest(), excess, "unauthenticated")
        if strangers.count + self._tenants.count >= limits.connections:
            self.close_one()
        strangers.add(connection)
        return connection

    def forget(self, connection: ServerConnection) -> None:
        """The connection is closed. May be called again."""
        self._pool(connection).discard(connection)

    def close_one(self) -> None:
        """Close one connection to make room, an unauthenticated one if there is any."""
        pool = self._strangers if self._strangers.count else self._tenants
        if pool.count:
            self._close(pool.worst_of(pool.largest()), "total")

    def set_busy(self, connection: ServerConnection, is_busy: bool) -> None:
        """Count it as busy or idle from now on."""
        if self._pool(connection).set_busy(connection, is_busy):
            connection.since = self._clock()

    def _close_overdue(self, group: str, excess: int, limit: str) -> None:
        """Close this many of an address, if they have had time to show a key."""
        overdue_before = self._clock() - self.limits.grace_s
        for _ in range(min(excess, self._strangers.size(group))):
            worst = self._strangers.worst_of(group)
            if worst.since > overdue_before:
                return
            self._close(worst, limit)

    def authenticate(self, connection: ServerConnection, tenant_id: str) -> None:
        """`Connection.authenticate`."""
        if not self._pool(connection).discard(connection):
            return  # it was closed meanwhile
        before = connection.group, connection.is_authenticated
        connection.group, connection.is_authenticated = tenant_id, True
        tenants, most = self._tenants, self.limits.connections
        tenants.add(connection)
        if tenants.count <= most - most // _KEPT_FOR_NEWCOMERS:
            return
        worst = tenants.worst_of(tenants.largest(), is_newest_busy=True)
        if worst is not connection:
            self._close(worst, "total")
            return
        tenants.discard(connection)
        connection.group, connection.is_authenticated = before
        self._pool(connection).add(connection)
        self.closed["total"] += 1
        raise TooManyConnectionsError(
            f"your requests use {tenants.size(tenant_id)} of the service's {most} connections",
            retry_after_s=1.0,
            remedy="use fewer at once, or have the operator raise limits.connections and `ulimit`",
        )

    def _pool(self, connection: ServerConnection) -> _Pool:
        return self._tenants if connection.is_authenticated else self._strangers

    def _close(self, connection: ServerConnection, limit: str) -> None:
        self.closed[limit] += 1
        self.forget(connection)
        connection.close()


class _Pool:
    """Connections by group, and the idle ones of each in the order in which they became idle."""

    def __init__(self) -> None:
        self.count = 0
        self._idle: dict[str, dict[ServerConnection, None]] = {}
        self._busy: dict[str, dict[ServerConnection, None]] = {}
        self._sizes: Counter[str] = Counter()
        self._by_size: list[dict[str, None]] = [{}]
        """Groups by size, so that finding the largest takes no search. The last is not empty."""

    def add(self, connection: ServerConnection) -> None:
        """Add it, as the newest of its group."""
        self._put(connection)
        self._resize(connection.group, 1)

    def discard(self, connection: ServerConnection) -> bool:
        """Remove it; False if it was not in here."""
        is_counted = self._take(connection)
        if is_counted:
            self._resize(connection.group, -1)
        return is_counted

    def set_busy(self, connection: ServerConnection, is_busy: bool) -> bool:
        """Move it to the busy or to the idle ones; False if it is not in here."""
        is_counted = self._take(connection)
        if is_counted:
            connection.is_busy = is_busy
            self._put(connection)
        return is_counted

    def _put(self, connection: ServerConnection) -> None:
        place = self._busy if connection.is_busy else self._idle
        place.setdefault(connection.group, {})[connection] = None

    def _take(self, connection: ServerConnection) -> bool:
        place = self._busy if connection.is_busy else self._idle
        members = place.get(connection.group)
        if members is None or connection not in members:
            return False
        del members[connection]
        if not members:
            del place[connection.group]
        return True

    def _resize(self, group: str, change: int) -> None:
        size = self._sizes[group]
        self._by_size[size].pop(group, None)
        self.count += change
        size += change
        if size:
            self._sizes[group] = size
            if size == len(self._by_size):
                self._by_size.append({})
            self._by_size[size][group] = None
        else:
            del self._sizes[group]
        while len(self._by_size) > 1 and not self._by_size[-1]:
            self._by_size.pop()

    def size(self, group: str) -> int:
        """How many connections a group has."""
        return self._sizes[group]

    def largest(self) -> str:
        """The group with the most connections; there must be one."""
        return next(iter(self._by_size[-1]))

    def worst_of(self, group: str, *, is_newest_busy: bool = False) -> ServerConnection:
        """The one of a group to close: the longest idle, else the oldest or newest busy one."""
        idle = self._idle.get(group)
        if idle:
            return next(iter(idle))
        busy = self._busy[group]
        return next(reversed(busy)) if is_newest_busy else next(iter(busy))


@functools.lru_cache(maxsize=4096)
def address_group(host: str) -> str:
    """The unit that counts as one address: IPv4 addresses, IPv6 /64 networks, or all Unix sockets.

    An IPv6 client usually has a whole /64.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or UNIX
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
