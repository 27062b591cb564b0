from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinsmith.service.http.edge import ExchangeHandler, HttpEdge, HttpExchange
from tinsmith.service.run.private_socket import NAME, PrivateSocket, listening, socket_path
from tinsmith.wire.exchange import HttpReply


async def say_hello(incoming: HttpExchange) -> None:
    await incoming.answer(HttpReply(200, {"Content-Length": "5"}, [b"hello"]))


@contextlib.asynccontextmanager
async def listening_in(handle: ExchangeHandler, folder: Path) -> AsyncIterator[PrivateSocket]:
    with socket_path(folder) as path:
        async with listening(HttpEdge(handle), path) as private:
            yield private


async def answer_at(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("name", ["short", "long" * 30])
def test_the_private_socket_answers_only_its_owner_even_with_a_long_path(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()

    async def ask() -> Path:
        async with listening_in(say_hello, folder) as private:
            path = Path(private.path)
            assert mode_of(path) == 0o600
            assert path.parent == folder or mode_of(path.parent) == 0o700
            assert (await answer_at(private.path)).endswith(b"hello")
        return path

    path = asyncio.run(ask())

    assert not path.exists()
    assert path.parent == folder or not path.parent.exists()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_stale_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / NAME))

    async def ask() -> None:
        async with listening_in(say_hello, tmp_path) as private:
            assert (await answer_at(private.path)).endswith(b"hello")

    asyncio.run(ask())


def test_closing_waits_until_a_response_is_complete(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def say_slowly(incoming: HttpExchange) -> None:
        await incoming.start(200, {})
        await incoming.write(b"hel")
        begun.set()
        await may_end.wait()
        await incoming.write(b"lo")
        await incoming.end()

    async def ask() -> None:
        async with listening_in(say_slowly, tmp_path) as private:
            asking = asyncio.create_task(answer_at(private.path))
            await begun.wait()
            asyncio.get_running_loop().call_soon(may_end.set)
        assert b"lo" in await asking

    asyncio.run(ask())
