"""Opens the ledger that an address names, and imports nothing of the others.

| address | ledger |
|---|---|
| `memory:` | in this process, lost with it |
| `sqlite:///path/to/folder` | a folder with one SQLite file, for one process |
| `postgresql://user@host/database` | a PostgreSQL database, for any number of servers |
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tinsmith.errors import ValidationError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import Retention


async def open_ledger(
    address: str, *, retention: Retention | None = None, accept_loss: bool = False
) -> Ledger:
    """Open a ledger, or make it where there is none.

    Args:
        address: Where it is.
        retention: How long it keeps what.
        accept_loss: Whether to go on from a SQLite file that has lost commits.

    Raises:
        ValidationError: The address names no ledger that is known.
        LedgerError: It cannot be opened; the message says why and what to do.
    """
    scheme = urlsplit(address).scheme
    if scheme == "memory":
        from tinsmith.service.ledger.memory import MemoryLedger

        return MemoryLedger(retention=retention)
    if scheme == "sqlite":
        from tinsmith.service.ledger.sqlite import SqliteLedger

        return await SqliteLedger.open(
            _folder(address), retention=retention, accept_loss=accept_loss
        )
    if scheme in ("postgres", "postgresql"):
        return await _open_postgres(address, retention)
    raise ValidationError(
        f"{scheme or 'no scheme'!r} is not a kind of ledger",
        remedy="use memory:, sqlite:///path/to/folder or postgresql://user@host/database",
    )


async def open_ledger_beside(address: str, *, may_make: bool = True) -> Ledger:
    """Open the ledger of a service that may be running, to look up and change entries alone.

    Args:
        address: Where it is.
        may_make: Whether it is made where there is none.

    Raises:
        ValidationError: The address names no ledger that is known, or one that is gone with its
            process, or a folder without one if none may be made.
        LedgerError: It cannot be opened; the message says why and what to do.
    """
    scheme = urlsplit(address).scheme
    if scheme == "memory":
        raise ValidationError(
            "a ledger in memory belongs to one process, and ends with it",
            remedy="use sqlite:///path/to/folder or postgresql://user@host/database",
        )
    if scheme == "sqlite":
        from tinsmith.service.ledger.sqlite import SqliteLedger

        folder = _folder(address)
        if not may_make and not SqliteLedger.is_in(folder):
            raise ValidationError(
                f"there is no ledger in {folder}",
                remedy="name the service's folder with --data; its first start makes one, or "
                "`tinsmith key create`",
            )
        return await SqliteLedger.open_beside(folder)
    return await open_ledger(address)


def _folder(address: str) -> Path:
    parts = urlsplit(address)
    if parts.netloc or not parts.path or parts.query:
        raise ValidationError(
            f"{address!r:.200} names no folder", remedy="use sqlite:///path/to/folder"
        )
    return Path(unquote(parts.path))


async def _open_postgres(address: str, retention: Retention | None) -> Ledger:
    try:
        from tinsmith.service.ledger.postgres import PostgresLedger
    except ModuleNotFoundError as exc:
        raise ValidationError(
            "a PostgreSQL ledger needs asyncpg", remedy="pip install 'tinsmith[postgres]'"
        ) from exc
    return await PostgresLedger.open(address, retention=retention)
