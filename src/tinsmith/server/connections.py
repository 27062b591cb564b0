"""Which connections may stay open: bounds per address and in total, before and after a key.

A connection is unauthenticated until a request on it has shown a valid credential. Unauthenticated
connections are bounded per address and in total; where there are too many, those that have been
idle longest are closed, so that a newcomer always gets a chance to show its key. One that has just
been opened is spared, because clients that start together connect together; only the bound of all
connections holds for it too. Authenticated ones are bounded in total only: behind a NAT or a proxy
all users share one address. Where there are too many of these, the tenant that has most of them
gives one up.

This module only counts. `serve/accepting.py` admits what a listening socket accepts, `around` wraps
the application, and `server/app.py` tells whose credential was shown. The three meet by the pair
that ASGI calls `client`, so any server that can be given accepted sockets can be bounded by it.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tinsmith.errors import APIStatusError
from tinsmith.server.incoming import Incoming

Client: TypeAlias = tuple[str, int]
"""Host and port of the peer, as in ASGI; for a Unix socket any pair that is unique."""
UNIX = "unix"
"""The address of all who come over a Unix socket."""
_UNAVAILABLE = 503
_KEPT_FOR_NEWCOMERS = 8
"""Of all connections, one in so many stays free of authenticated ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The most that may be open at once."""

    connections: int = 10_000
    unauthenticated: int = 2048
    unauthenticated_per_address: int = 1024
    grace_s: float = 5.0
    """How long an unauthenticated connection may be idle before it counts for its two limits."""

    def within(self, connections: int) -> ConnectionLimits:
        """The same limits in a process that can have no more connections than this."""
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
    """503: the service has as many connections as it can have, most of them of this tenant."""

    default_status = _UNAVAILABLE


class Connection:
    """One open connection. Made by `ConnectionGate.admit`.

    Attributes:
        close: Closes it at once. Whoever accepted it sets this.
        group: The address that it came from, or the tenant that it belongs to.
        since: When it was opened, or became busy or idle.
    """

    __slots__ = ("_gate", "client", "close", "group", "is_authenticated", "is_busy", "since")

    def __init__(self, gate: ConnectionGate, address: str, close: Callable[[], None]) -> None:
        self._gate = gate
        self.client: Client | None = None
        self.close = close
        self.group = address
        self.is_authenticated = False
        self.is_busy = False
        self.since = 0.0

    def authenticate(self, tenant_id: str) -> None:
        """A request on it has shown a credential of this tenant.

        Raises:
            TooManyConnectionsError: There is no room for another connection of this tenant.
        """
        if not self.is_authenticated or self.group != tenant_id:
            self._gate._authenticate(self, tenant_id)


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
        self._by_client: dict[Client, Connection] = {}

    @property
    def counts(self) -> dict[tuple[str, ...], float]:
        """How many are open, as a metric with one label has it."""
        return {
            ("unauthenticated",): float(self._strangers.count),
            ("authenticated",): float(self._tenants.count),
        }

    @property
    def closed_counts(self) -> dict[tuple[str, ...], float]:
        """`closed`, as a metric with one label has it."""
        return {(limit,): float(count) for limit, count in self.closed.items()}

    # For whoever accepts connections

    def admit(self, host: str, close: Callable[[], None]) -> Connection:
        """Count a connection that was accepted, and make room for it by closing others."""
        connection = Connection(self, address_group(host), close)
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

    def make_known(self, connection: Connection, client: Client) -> None:
        """From now on requests with this `client` are of this connection."""
        connection.client = client
        self._by_client[client] = connection

    def forget(self, connection: Connection) -> None:
        """The connection is closed. May be called again."""
        self._pool(connection).discard(connection)
        if connection.client is not None and self._by_client.get(connection.client) is connection:
            del self._by_client[connection.client]

    def close_one(self) -> None:
        """Close one connection, of somebody without a key if there is one, for lack of room."""
        pool = self._strangers if self._strangers.count else self._tenants
        if pool.count:
            self._close(pool.worst_of(pool.largest()), "total")

    # For the application

    def around(
        self, app: Callable[[Incoming], Awaitable[None]]
    ) -> Callable[[Incoming], Awaitable[None]]:
        """The application, with its requests' connections known and counted as busy."""

        async def gated(incoming: Incoming) -> None:
            client = incoming.client
            connection = None if client is None else self._by_client.get(client)
            if connection is None:
                await app(incoming)
                return
            incoming.connection = connection
            self._set_busy(connection, True)
            try:
                await app(incoming)
            finally:
                self._set_busy(connection, False)

        return gated

    def _close_overdue(self, group: str, excess: int, limit: str) -> None:
        """Close so many of an address, as far as they have had the time to show a key."""
        overdue_before = self._clock() - self.limits.grace_s
        for _ in range(min(excess, self._strangers.size(group))):
            worst = self._strangers.worst_of(group)
            if worst.since > overdue_before:
                return
            self._close(worst, limit)

    def _set_busy(self, connection: Connection, is_busy: bool) -> None:
        if self._pool(connection).set_busy(connection, is_busy):
            connection.since = self._clock()

    def _authenticate(self, connection: Connection, tenant_id: str) -> None:
        if not self._pool(connection).discard(connection):
            return  # it was closed in the meantime
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
            f"your requests have {tenants.size(tenant_id)} of the {most} connections that the "
            "service can have",
            retry_after_s=1.0,
            remedy="use fewer at once, or have its operator raise limits.connections and `ulimit`",
        )

    def _pool(self, connection: Connection) -> _Pool:
        return self._tenants if connection.is_authenticated else self._strangers

    def _close(self, connection: Connection, limit: str) -> None:
        self.closed[limit] += 1
        self.forget(connection)
        connection.close()


class _Pool:
    """Connections by group, each group's idle ones in the order in which they became idle."""

    def __init__(self) -> None:
        self.count = 0
        self._idle: dict[str, dict[Connection, None]] = {}
        self._busy: dict[str, dict[Connection, None]] = {}
        self._sizes: Counter[str] = Counter()
        self._by_size: list[dict[str, None]] = [{}]
        """Groups by their size: many groups are no more work than one. The last is not empty."""

    def add(self, connection: Connection) -> None:
        """Count it, as the newest of its group."""
        self._put(connection)
        self._resize(connection.group, 1)

    def discard(self, connection: Connection) -> bool:
        """Count it no longer; False if it was not counted."""
        is_counted = self._take(connection)
        if is_counted:
            self._resize(connection.group, -1)
        return is_counted

    def set_busy(self, connection: Connection, is_busy: bool) -> bool:
        """Count it among the others from now on; False if it is not counted."""
        is_counted = self._take(connection)
        if is_counted:
            connection.is_busy = is_busy
            self._put(connection)
        return is_counted

    def _put(self, connection: Connection) -> None:
        place = self._busy if connection.is_busy else self._idle
        place.setdefault(connection.group, {})[connection] = None

    def _take(self, connection: Connection) -> bool:
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
        """How many a group has."""
        return self._sizes[group]

    def largest(self) -> str:
        """The group that has most; there must be one."""
        return next(iter(self._by_size[-1]))

    def worst_of(self, group: str, *, is_newest_busy: bool = False) -> Connection:
        """The one of a group to close: idle for longest, else the oldest, or newest, busy one."""
        idle = self._idle.get(group)
        if idle:
            return next(iter(idle))
        busy = self._busy[group]
        return next(reversed(busy)) if is_newest_busy else next(iter(busy))


@functools.lru_cache(maxsize=4096)
def address_group(host: str) -> str:
    """What counts as one address: an IPv4 address, the /64 of an IPv6 one, or all Unix sockets.

    Whoever has one IPv6 address usually has its whole /64.
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
