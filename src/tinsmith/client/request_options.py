"""`Timeout` and `RequestOptions`, for programs that name them.

The official SDK has them from its HTTP library and its generated base; no public method of its
clients takes either. Ours take `timeout` in seconds, for the whole call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypedDict

from tinsmith.errors import ValidationError

Seconds: TypeAlias = float | None


class _NotGiven:
    """Stands for an argument that was left out, since None means no limit."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN = _NotGiven()


class Timeout:
    """Seconds for the parts of an HTTP exchange, made in the ways that `httpx.Timeout` is.

    `Timeout(5.0)`, `Timeout(None)` for no limit, `Timeout(5.0, connect=10.0)`, all four by name, or
    a tuple `(connect, read, write, pool)` of at least two.
    """

    __slots__ = ("connect", "pool", "read", "write")

    def __init__(
        self,
        timeout: Timeout | Seconds | tuple[Seconds, ...] | _NotGiven = _NOT_GIVEN,
        *,
        connect: Seconds | _NotGiven = _NOT_GIVEN,
        read: Seconds | _NotGiven = _NOT_GIVEN,
        write: Seconds | _NotGiven = _NOT_GIVEN,
        pool: Seconds | _NotGiven = _NOT_GIVEN,
    ) -> None:
        parts = (connect, read, write, pool)
        if isinstance(timeout, Timeout | tuple):
            if any(part is not _NOT_GIVEN for part in parts):
                raise ValidationError("pass either one timeout or its parts, not both")
            self.connect, self.read, self.write, self.pool = _four(timeout)
            return
        if isinstance(timeout, _NotGiven) and any(isinstance(part, _NotGiven) for part in parts):
            raise ValidationError("pass a default timeout, or all four parts")
        self.connect = _first_given(connect, timeout)
        self.read = _first_given(read, timeout)
        self.write = _first_given(write, timeout)
        self.pool = _first_given(pool, timeout)

    def as_dict(self) -> dict[str, Seconds]:
        """The four parts by name."""
        return {
            "connect": self.connect,
            "read": self.read,
            "write": self.write,
            "pool": self.pool,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeout) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.connect, self.read, self.write, self.pool))

    def __repr__(self) -> str:
        parts = self.as_dict()
        if len(set(parts.values())) == 1:
            return f"Timeout(timeout={self.connect})"
        return f"Timeout({', '.join(f'{name}={value}' for name, value in parts.items())})"


def _four(timeout: Timeout | tuple[Seconds, ...]) -> tuple[Seconds, Seconds, Seconds, Seconds]:
    if isinstance(timeout, Timeout):
        return timeout.connect, timeout.read, timeout.write, timeout.pool
    if not 2 <= len(timeout) <= 4:
        raise ValidationError("a timeout tuple must be (connect, read[, write[, pool]])")
    connect, read, write, pool = (*timeout, None, None)[:4]
    return connect, read, write, pool


def _first_given(part: Seconds | _NotGiven, default: Seconds | _NotGiven) -> Seconds:
    if not isinstance(part, _NotGiven):
        return part
    assert not isinstance(default, _NotGiven)
    return default


class RequestOptions(TypedDict, total=False):
    """The options of one request in the official SDK's generated base, for annotations."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
