"""A service that costs next to nothing, so that what is measured is the client.

    python -m benchmarks.workloads.server [--delay-ms N] [--plain]

Prints its port, and ends when its standard input does. It answers what a client asks while it
samples and trains, for one user, one sampler and one model: bodies of samples are not read, and
each result is the same, made once. A sample takes `--delay-ms` from its submission to its end.
Results are kept until they are fetched.

`--plain` leaves out our extensions, which the official SDK does not ask for anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import httptools
import uvloop

from tinsmith.types import (
    ForwardBackwardOutput,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinsmith.wire import content, proto_format, proto_samples

SAMPLED_TOKENS = 64
JSON, PROTOBUF = b"application/json", b"application/x-protobuf"


class Bench:
    """What the server knows: the samples under way and those that ended."""

    def __init__(self, delay_s: float, flags: dict[str, Any]) -> None:
        self.delay_s = delay_s
        self.flags = flags
        self.count = 0
        self.ended: dict[int, str] = {}
        self.last = 0
        self.waiting: list[tuple[Connection, int, bool]] = []
        self.results: dict[str, bytes] = {}
        self.is_telling = False
        sequence = SampledSequence(
            stop_reason="length",
            tokens=list(range(SAMPLED_TOKENS)),
            logprobs=[-0.5] * SAMPLED_TOKENS,
        )
        self.sample = b"".join(proto_samples.encode_sample_response(SampleResponse([sequence])))
        self.size = f'"response_payload_uncompressed_size":{len(self.sample)}'
        self.inline = f'{self.size},"payload":"{base64.b64encode(self.sample).decode()}"'
        self.loop = asyncio.get_running_loop()

    # Samples

    def submit_sample(self) -> str:
        self.count += 1
        request_id = f"bench-sample-{self.count}"
        self.loop.call_later(self.delay_s, self._end, request_id)
        return request_id

    def _end(self, request_id: str) -> None:
        self.last += 1
        self.ended[self.last] = request_id
        if self.waiting and not self.is_telling:
            self.is_telling = True
            self.loop.call_soon(self._tell)

    def _tell(self) -> None:
        self.is_telling = False
        waiting, self.waiting = self.waiting, []
        for connection, cursor, are_inline in waiting:
            connection.reply(self.completions(cursor, are_inline=are_inline))

    def completions(self, cursor: int, *, are_inline: bool) -> bytes:
        for number in range(cursor, 0, -1):
            if self.ended.pop(number, None) is None:
                break
        told = self.inline if are_inline else self.size
        found = ",".join(
            f'{{"state":"finished","request_id":"{request_id}",{told}}}'
            for request_id in self.ended.values()
        )
        return f'{{"completions":[{found}],"cursor":{self.last}}}'.encode()

    # Training

    def submit(self, result: bytes) -> str:
        self.count += 1
        request_id = f"bench-{self.count}"
        self.results[request_id] = result
        return request_id

    def trained(self, body: bytes, encoding: str | None) -> str:
        request = proto_format.decode_forward_backward_request(content.decompress(body, encoding))
        outputs = [
            {"logprobs": TensorData([-0.5] * datum.model_input.length, "float32")}
            for datum in request.forward_backward_input.data
        ]
        output = ForwardBackwardOutput("logprobs", outputs, {"loss:sum": 1.0})
        return self.submit(b"".join(proto_format.encode_forward_backward_output(output)))


class Connection(asyncio.Protocol):
    """One connection: reads requests, finds who answers, writes the reply."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.parser = httptools.HttpRequestParser(self)
        self.path = b""
        self.encoding: str | None = None
        self.content_type: str | None = None
        self.pieces: list[bytes] = []
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.encoding = None
        self.path = url.split(b"?")[0].removeprefix(b"/api/v1/")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-encoding":
            self.encoding = value.decode()
        elif name.lower() == b"content-type":
            self.content_type = value.decode()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.body, self.pieces = b"".join(self.pieces), []
        ANSWERS.get(self.path, _nothing)(self)

    def reply(self, body: bytes, kind: bytes = JSON) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (kind, len(body), body)
        )

    def reply_json(self, **fields: Any) -> None:
        self.reply(json.dumps(fields).encode())


Answer = Callable[[Connection], None]


def _nothing(connection: Connection) -> None:
    connection.reply(b"{}")


def _fixed(**fields: Any) -> Answer:
    answer = json.dumps(fields).encode()
    return lambda connection: connection.reply(answer)


def _flags(connection: Connection) -> None:
    connection.reply_json(**connection.bench.flags)


def _sample(connection: Connection) -> None:
    connection.reply(_submitted(connection.bench).encode())


def _submitted(bench: Bench) -> str:
    request_id = bench.submit_sample()
    return f'{{"request_id":"{request_id}","sample_sequence_ids":["{request_id}-0"]}}'


def _sample_many(connection: Connection) -> None:
    text = memoryview(connection.body)
    if content.is_packed(connection.content_type):
        text = text[4 : 4 + int.from_bytes(text[:4], "little")]
    count = bytes(text).count(b'"seq_id":')
    items = ",".join(_submitted(connection.bench) for _ in range(count))
    connection.reply(f'{{"items":[{items}]}}'.encode())


def _retrieve_many(connection: Connection, *, are_inline: bool = False) -> None:
    bench = connection.bench
    cursor = json.loads(connection.body)["prev_cursor"]
    if bench.last > cursor:
        connection.reply(bench.completions(cursor, are_inline=are_inline))
    else:
        bench.waiting.append((connection, cursor, are_inline))


def _retrieve(connection: Connection) -> None:
    bench, request_id = connection.bench, json.loads(connection.body)["request_id"]
    if request_id.startswith("bench-sample"):
        connection.reply(bench.sample, PROTOBUF)
        return
    result = bench.results.pop(request_id)
    connection.reply(result, JSON if result.startswith(b"{") else PROTOBUF)


def _train(connection: Connection) -> None:
    connection.reply_json(request_id=connection.bench.trained(connection.body, connection.encoding))


def _later(**fields: Any) -> Answer:
    result = json.dumps(fields).encode()
    return lambda connection: connection.reply_json(request_id=connection.bench.submit(result))


ANSWERS: dict[bytes, Answer] = {
    b"client/config": _flags,
    b"client/dynamic_config": _fixed(),
    b"create_session": _fixed(type="create_session", session_id="bench"),
    b"session_heartbeat": _fixed(type="session_heartbeat"),
    b"telemetry": _fixed(status="accepted"),
    b"create_sampling_session": _fixed(
        type="create_sampling_session", sampling_session_id="bench:sample:0"
    ),
    b"asample": _sample,
    b"retrieve_futures": _retrieve_many,
    b"retrieve_future": _retrieve,
    b"tinsmith/asample_many": _sample_many,
    b"tinsmith/retrieve_results": functools.partial(_retrieve_many, are_inline=True),
    b"create_model": _later(type="create_model", model_id="bench:train:0"),
    b"forward_backward": _train,
    b"optim_step": _later(type="optim_step", metrics={}),
}


async def serve(delay_s: float, flags: dict[str, Any]) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    bench = Bench(delay_s, flags)
    server = await loop.create_server(lambda: Connection(bench), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    flags: dict[str, Any] = {"sample_use_retrieve_futures": True, "parallel_fwdbwd_chunks": True}
    if not arguments.plain:
        flags |= {
            "tinsmith_batch_items": 64,
            "tinsmith_inline_bytes": 65_536,
            "tinsmith_packed_prompts": True,
        }
    uvloop.run(serve(arguments.delay_ms / 1000, flags))


if __name__ == "__main__":
    main()
