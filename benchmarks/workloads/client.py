"""What a client costs while it samples and trains, the same lines for both SDKs.

The server runs in a process of its own and costs as little as it can (`server.py`). What it took is
told beside the client's figures: where it was busy all the time, the rate is its own and not the
client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.harness.memory import resident_bytes

DELAY_MS = "20"
"""How long the server takes for a sample; what a caller waits beyond it is what the client adds."""
WITHHELD_MS = "1000"
"""Longer than it takes to submit hundreds of samples."""
WARM_UP_SAMPLES = 50
_THREADS = "/proc/self/task"


class Server:
    """The server's process."""

    def __init__(self, python: str, delay_ms: str, *, is_plain: bool) -> None:
        self.delay_s = float(delay_ms) / 1e3
        command = [python, "-m", "benchmarks.workloads.server", f"--delay-ms={delay_ms}"]
        self._process = subprocess.Popen(
            [*command, *(["--plain"] if is_plain else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def cpu_s(self) -> float:
        """What it has used so far; 0 where the system cannot say."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            # `pathlib` would be in the memory of every contestant.
            with open(f"/proc/{self._process.pid}/stat", encoding="utf-8") as opened:  # noqa: PTH123
                fields = opened.read().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def running(server_python: str, delay_ms: str = DELAY_MS, *, is_plain: bool) -> Iterator[Server]:
    server = Server(server_python, delay_ms, is_plain=is_plain)
    try:
        yield server
    finally:
        server.end()


class Burst(NamedTuple):
    """What a number of samples took."""

    cpu_s: float
    wall_s: float
    server_cpu_s: float
    added_s: list[float]
    """What each caller waited beyond the server's time."""


def samples(
    package: str,
    server_python: str,
    tokens: str,
    in_flight: str,
    count: str,
    extensions: str = "no",
    prompts: str = "one",
    delay_ms: str = DELAY_MS,
) -> dict[str, float]:
    """So many samples, so many of them at a time, from coroutines.

    Of one prompt, or with `prompts="own"` each of its own, which is made from a list as it is sent.
    """
    with running(server_python, delay_ms, is_plain=extensions != "yes") as server:
        client, sampler = _sampler(package, server.url)
        ids = list(range(1000, 1000 + int(tokens)))
        prompt = ids if prompts == "own" else client.ModelInput.from_ints(ids)
        _burst(client, sampler, server, prompt, 1, 1)
        _burst(client, sampler, server, prompt, WARM_UP_SAMPLES, int(in_flight))
        found = _burst(client, sampler, server, prompt, int(count), int(in_flight))
        return figures(found, int(count))


def figures(found: Burst, count: int) -> dict[str, float]:
    """What is told of so many samples."""
    threads = len(os.listdir(_THREADS)) if os.path.isdir(_THREADS) else threading.active_count()  # noqa: PTH112, PTH208
    resident = resident_bytes()  # before we load what only we need
    percentiles = _percentiles(found.added_s)
    return {
        "cpu_s": found.cpu_s / count,
        "wall_s": found.wall_s / count,
        "added_p50_s": max(1e-6, percentiles[49]),
        "added_p99_s": max(1e-6, percentiles[98]),
        "server_share": found.server_cpu_s / found.wall_s,
        "threads": threads,
        "resident_bytes": resident,
    }


def _percentiles(numbers: list[float]) -> list[float]:
    from statistics import quantiles

    return quantiles(numbers, n=100, method="inclusive")


def beside_busy_thread(
    package: str, server_python: str, count: str, extensions: str = "no"
) -> dict[str, float]:
    """How much longer samples take while another thread of the program computes in Python."""
    with running(server_python, is_plain=extensions != "yes") as server:
        client, sampler = _sampler(package, server.url)
        prompt = client.ModelInput.from_ints(list(range(1000, 2000)))
        _burst(client, sampler, server, prompt, WARM_UP_SAMPLES, 400)
        alone = _burst(client, sampler, server, prompt, int(count), 400)
        is_over = threading.Event()
        busy = threading.Thread(target=_compute, args=(is_over,), daemon=True)
        busy.start()
        beside = _burst(client, sampler, server, prompt, int(count), 400)
        is_over.set()
        busy.join()
        return {"slowdown": beside.wall_s / alone.wall_s, "wall_s": beside.wall_s / int(count)}


def submissions(package: str, server_python: str, count: str) -> dict[str, float]:
    """How long `sample` takes to return, again and again, while the server withholds its answers.

    Each has a prompt of its own, so that nothing of one can be used for the next.
    """
    with running(server_python, WITHHELD_MS, is_plain=True) as server:
        client, sampler = _sampler(package, server.url)
        params = client.SamplingParams(max_tokens=64, temperature=1.0)
        prompts = [
            client.ModelInput.from_ints(list(range(first, first + 1000)))
            for first in range(WARM_UP_SAMPLES + int(count))
        ]
        _submit(sampler, prompts[:WARM_UP_SAMPLES], params)
        percentiles = _percentiles(_submit(sampler, prompts[WARM_UP_SAMPLES:], params))
        return {"latency_p50_s": percentiles[49], "latency_p99_s": percentiles[98]}


def _submit(sampler: Any, prompts: list[Any], params: Any) -> list[float]:
    """Call for each, await them all, and tell how long each call took to return."""
    took, futures = [0.0] * len(prompts), []
    for number, prompt in enumerate(prompts):
        began = time.perf_counter()
        futures.append(sampler.sample(prompt, 1, params))
        took[number] = time.perf_counter() - began
    for future in futures:
        future.result()
    return took


def batch(package: str, server_python: str, tokens: str, datums: str) -> dict[str, float]:
    """One training batch: from the user's lists to the loss that came back."""
    with running(server_python, is_plain=True) as server:
        client = importlib.import_module(package)
        service = client.ServiceClient(base_url=server.url, api_key="tml-bench")
        training = service.create_lora_training_client("bench")
        _train(client, training, 16, 2)
        cpu, wall, used = time.process_time(), time.perf_counter(), server.cpu_s()
        _train(client, training, int(tokens), int(datums))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return {
            "cpu_s": cpu,
            "wall_s": wall,
            "server_share": (server.cpu_s() - used) / wall,
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def first_answer(package: str, server_python: str) -> dict[str, float]:
    """From nothing loaded to the first sample in hand."""
    with running(server_python, is_plain=True) as server:
        cpu, wall = time.process_time(), time.perf_counter()
        client, sampler = _sampler(package, server.url)
        prompt = client.ModelInput.from_ints([1, 2, 3])
        sampler.sample(prompt, 1, client.SamplingParams(max_tokens=64)).result()
        return {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "resident_bytes": resident_bytes(),
        }


def _sampler(package: str, url: str) -> tuple[Any, Any]:
    client = importlib.import_module(package)
    service = client.ServiceClient(base_url=url, api_key="tml-bench")
    return client, service.create_sampling_client(base_model="bench")


def _burst(
    client: Any, sampler: Any, server: Server, prompt: Any, count: int, in_flight: int
) -> Burst:
    """Draw samples of a prompt, or where it is a list of token ids each of a prompt of its own."""
    params = client.SamplingParams(max_tokens=64, temperature=1.0)
    # All of it before the burst: memory of our own that is taken amid the burst's, and still held
    # when resident memory is read, would keep the C library from giving back what was freed below.
    added = [0.0] * count

    async def worker(numbers: Iterator[int]) -> None:
        for number in numbers:  # shared: each takes the next one when it is free
            began = time.perf_counter()
            is_own = isinstance(prompt, list)
            asked = client.ModelInput.from_ints(prompt) if is_own else prompt
            await sampler.sample_async(asked, 1, params)
            added[number] = time.perf_counter() - began - server.delay_s

    async def whole() -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(worker(numbers) for _ in range(min(in_flight, count))))

    used, cpu, wall = server.cpu_s(), time.process_time(), time.perf_counter()
    asyncio.run(whole())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Burst(cpu, wall, server.cpu_s() - used, added)


def _train(client: Any, training: Any, tokens: int, datums: int) -> None:
    ids = list(range(1000, 1000 + tokens))
    weights = [1.0] * tokens
    data = [
        client.Datum(
            model_input=client.ModelInput.from_ints(ids),
            loss_fn_inputs={
                "target_tokens": client.TensorData(data=ids, dtype="int64", shape=[tokens]),
                "weights": client.TensorData(data=weights, dtype="float32", shape=[tokens]),
            },
        )
        for _ in range(datums)
    ]
    training.forward_backward(data, "cross_entropy").result()


def _compute(is_over: threading.Event) -> None:
    number = 1
    while not is_over.is_set():
        for _ in range(1000):
            number = number * 1103515245 + 12345 & 0x7FFFFFFF
