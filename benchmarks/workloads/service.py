"""What a command costs the service: `tinsmith serve` with the fake engine, in a process of its own.

Commands are steps of the optimizer on a model that holds almost nothing, so that what is measured
is the way there and back: HTTP, the ledger's commit, the scheduler, the answer to the poll. The
client is ours, in this process; what the server took is told beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "benchmarks" / "results" / "scratch"
"""On the disk of the project: a temporary folder may be in memory."""
MODEL = "bench/model"
START_S = 60.0


class Served:
    """The service's process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = arguments
        self.start_s = self.start()

    def start(self) -> float:
        """Start it; returns how long it took until it was ready."""
        command = [sys.executable, "-m", "tinsmith", "serve", "--engine=fake", f"--model={MODEL}"]
        command += [f"--data={self._folder}", f"--port={self.port}", *self._arguments]
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not self._is_ready():
            assert self.process.poll() is None, "the service has ended"
            assert time.perf_counter() < began + START_S, "the service does not start"
            time.sleep(0.005)
        return time.perf_counter() - began

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def cpu_s(self) -> float:
        """What it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> float:
        """The memory that it has in use."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))

    def kill(self) -> None:
        """End it with no chance to do anything about it."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """A running service on a folder of its own."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="service-", dir=SCRATCH))
    try:
        service = Served(folder, *arguments)
        try:
            yield service
        finally:
            service.kill()
    finally:
        shutil.rmtree(folder)


def _database(address: str) -> tuple[str, ...]:
    return (f"--database={address}",) if address else ()


def commands(
    clients: str, count: str, in_flight: str = "1", database: str = ""
) -> dict[str, float]:
    """So many commands by so many clients, each with so many of its own under way."""
    import tinsmith

    async def one(client: tinsmith.ServiceClient, numbers: Iterator[int]) -> list[float]:
        training = await client.create_lora_training_client_async(MODEL, rank=1)
        params = tinsmith.AdamParams(learning_rate=1e-4)
        await (await training.optim_step_async(params))
        await begin.wait()
        latencies: list[float] = []

        async def worker() -> None:
            for _ in numbers:
                asked = time.perf_counter()
                await (await training.optim_step_async(params))
                latencies.append(time.perf_counter() - asked)

        await asyncio.gather(*(worker() for _ in range(int(in_flight))))
        return latencies

    async def all_of_them() -> dict[str, float]:
        numbers = iter(range(int(count)))
        with contextlib.ExitStack() as stack:
            tasks = []
            for _ in range(int(clients)):
                client = tinsmith.ServiceClient(base_url=service.url, api_key="tml-bench")
                stack.callback(client.close)
                tasks.append(asyncio.create_task(one(client, numbers)))
            await begin.wait()
            used, began = service.cpu_s(), time.perf_counter()
            latencies = list(itertools.chain.from_iterable(await asyncio.gather(*tasks)))
            wall_s = time.perf_counter() - began
        cuts = quantiles(latencies, n=100, method="inclusive")
        return {
            "wall_s": wall_s / len(latencies),
            "cpu_s": (service.cpu_s() - used) / len(latencies),
            "latency_p50_s": cuts[49],
            "latency_p99_s": cuts[98],
            "resident_bytes": service.resident_bytes(),
        }

    with served(*_database(database)) as service:
        begin = asyncio.Barrier(int(clients) + 1)
        return asyncio.run(all_of_them())


def idle_polls(count: str, seconds: str = "5", database: str = "") -> dict[str, float]:
    """So many polls held at a time, for a command that waits for one before it."""

    async def poll(body: bytes) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\n"
        head += b"X-API-Key: tml-bench\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        return writer

    async def hold(request_id: str) -> dict[str, float]:
        before = service.resident_bytes()
        body = b'{"request_id":"%s"}' % request_id.encode()
        writers = [await poll(body) for _ in range(int(count))]
        await asyncio.sleep(1.0)
        used, began = service.cpu_s(), time.perf_counter()
        await asyncio.sleep(float(seconds))
        wall_s = time.perf_counter() - began
        figures = {
            "server_share": (service.cpu_s() - used) / wall_s,
            "resident_bytes": (service.resident_bytes() - before) / int(count),
        }
        for writer in writers:
            writer.close()
        return figures

    with served("--gap-wait-s=60", *_database(database)) as service:
        return asyncio.run(hold(_stuck_command(service.url)))


def _stuck_command(url: str) -> str:
    """A command that waits for a number which never comes; returns its request id."""
    call = _caller(url)
    session = call("create_session", {"tags": [], "sdk_version": "0.36.0"})["session_id"]
    lora = {"rank": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
    model = call("create_model", made)["model_id"]
    step = {"model_id": model, "seq_id": 5, "adam_params": {}}
    request_id: str = call("optim_step", step)["request_id"]
    return request_id


def _caller(url: str) -> Any:
    import json

    def call(name: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{url}/api/v1/{name}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-API-Key": "tml-bench"},
        )
        with urllib.request.urlopen(request, timeout=30.0) as reply:
            return json.load(reply)

    return call


def recovery(count: str) -> dict[str, float]:
    """From the start after a `kill -9` to ready, after so many commands of one model."""
    import tinsmith

    with (
        served() as service,
        tinsmith.ServiceClient(base_url=service.url, api_key="tml-bench") as client,
    ):
        training = client.create_lora_training_client(MODEL, rank=1)
        params = tinsmith.AdamParams(learning_rate=1e-4)
        for start in range(0, int(count), 500):
            steps = [training.optim_step(params) for _ in range(min(500, int(count) - start))]
            for step in steps:
                step.result(60.0)
        service.kill()
        recovered_s = service.start()
        training.optim_step(params).result(60.0)
    return {"wall_s": recovered_s}


def load(
    samples: str, passes: str, sessions: str, body_bytes: str, database: str = ""
) -> dict[str, float]:
    """Samples and large training passes under way together, beside sessions that beat.

    Returns how slow the slowest heartbeat was, and what the service took. Raises if anything was
    refused.
    """
    with served(*_database(database)) as service:
        idle_bytes = service.resident_bytes()
        beats = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workloads.heartbeats", service.url, sessions],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert beats.stdout is not None
        beats.stdout.readline()  # all sessions are there
        used, began = service.cpu_s(), time.perf_counter()
        peak_bytes = asyncio.run(_heavy_work(service, int(samples), int(passes), int(body_bytes)))
        wall_s = time.perf_counter() - began
        told, _ = beats.communicate()
        latencies = [float(line) for line in told.split()]
        cuts = quantiles(latencies, n=100, method="inclusive")
        return {
            "wall_s": wall_s,
            "cpu_s": service.cpu_s() - used,
            "latency_p50_s": cuts[49],
            "latency_p99_s": cuts[98],
            "slowest_s": max(latencies),
            "resident_peak_bytes": peak_bytes,
            "resident_bytes": peak_bytes - idle_bytes,
        }


async def _heavy_work(service: Served, samples: int, passes: int, body_bytes: int) -> float:
    """Have everything under way at once; returns the most memory that the service took."""
    import tinsmith

    peak_bytes = service.resident_bytes()

    async def watch() -> None:
        nonlocal peak_bytes
        while True:
            peak_bytes = max(peak_bytes, service.resident_bytes())
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    with tinsmith.ServiceClient(base_url=service.url, api_key="tml-bench") as client:
        training = await client.create_lora_training_client_async(MODEL, rank=1)
        sampler = await client.create_sampling_client_async(base_model=MODEL)
        tokens = body_bytes // 16  # an input, a target and a weight take 16 bytes
        datum = tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints([7] * tokens),
            loss_fn_inputs={
                "target_tokens": tinsmith.TensorData(data=[8] * tokens, dtype="int64"),
                "weights": tinsmith.TensorData(data=[1.0] * tokens, dtype="float32"),
            },
        )
        prompt = tinsmith.ModelInput.from_ints([5] * 1000)
        params = tinsmith.SamplingParams(max_tokens=16)
        asked = [sampler.sample_async(prompt, 1, params) for _ in range(samples)]
        begun = [
            await training.forward_backward_async([datum], "cross_entropy") for _ in range(passes)
        ]
        await asyncio.gather(*asked, *begun)
    watching.cancel()
    return peak_bytes
