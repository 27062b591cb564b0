"""Sessions that beat once a second, in a process of their own; prints how long each beat took.

    python -m benchmarks.workloads.heartbeats URL SESSIONS

It says `ready` when all sessions are there, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

BEAT_S = 1.0


async def main(url: str, sessions: int) -> None:
    """Beat until the input ends."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    latencies: list[float] = []
    is_over = asyncio.Event()
    open_connections = [
        await asyncio.open_connection(address.hostname, address.port) for _ in range(sessions)
    ]

    async def post(number: int, name: str, body: dict[str, object]) -> dict[str, str]:
        reader, writer = open_connections[number]
        sent = json.dumps(body).encode()
        head = f"POST /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-bench\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.split("content-length:")[1].split("\r\n")[0])
        came = await reader.readexactly(length)
        assert " 200 " in answer.split("\r\n")[0], (answer, came)
        found: dict[str, str] = json.loads(came)
        return found

    async def beat(number: int, session_id: str) -> None:
        await asyncio.sleep(BEAT_S * number / sessions)
        while not is_over.is_set():
            asked = time.perf_counter()
            await post(number, "session_heartbeat", {"session_id": session_id})
            latencies.append(time.perf_counter() - asked)
            await asyncio.sleep(BEAT_S)

    made = [
        (await post(number, "create_session", {"tags": [], "sdk_version": "0.36.0"}))["session_id"]
        for number in range(sessions)
    ]
    print("ready", flush=True)
    beating = asyncio.gather(*(beat(number, one) for number, one in enumerate(made)))
    await asyncio.to_thread(sys.stdin.read)
    is_over.set()
    await beating
    for _, writer in open_connections:
        writer.close()
    print("\n".join(map(str, latencies)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
