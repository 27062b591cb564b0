"""Much at a time: nothing is refused, nothing is lost, and the event loop is never held up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.integration.service.scheduler.bench import Bench, bench
from tinsmith.service.ledger.sqlite import SqliteLedger
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.requests import UnloadModelRequest

STALL_S = 0.5
"""Far above what is seen, and less than a heartbeat may take."""


async def _longest_stall(is_over: asyncio.Event) -> float:
    """In time of the loop's own thread: what others do on the machine does not count."""
    longest = 0.0
    while not is_over.is_set():
        started = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - started)
    return longest


def test_a_burst_of_samples_and_training_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """Hundreds of samples with long prompts beside hundreds of passes."""

    async def run() -> float:
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        b = Bench(tmp_path, ledger)
        await b.open()
        lines = [f"session-{n}:train:0" for n in range(16)]
        for line in lines:
            await b.create(line)
        await b.add_sampler("session-0:sample:0")
        samples = [
            b.sample("session-0:sample:0", n, prompt=[n, *range(3000)], topk_prompt_logprobs=2)
            for n in range(200)
        ]
        passes = [
            b.forward_backward(line, n, list(range(200))) for n in range(1, 13) for line in lines
        ]
        ids = [*await asyncio.gather(*samples), *await asyncio.gather(*passes)]
        is_over = asyncio.Event()
        watching = asyncio.create_task(_longest_stall(is_over))
        for request_id in ids:
            assert not isinstance(await b.result(request_id), RequestFailedResponse)
        is_over.set()
        await b.close()
        await ledger.close()
        return await watching

    assert asyncio.run(run()) < STALL_S


def test_many_commands_settled_in_one_commit_free_their_slots(tmp_path: Path) -> None:
    """More than run at a time, settled by one commit: nobody else wakes the scheduler."""

    async def run() -> int:
        async with (
            await SqliteLedger.open(tmp_path / "ledger") as ledger,
            bench(tmp_path, ledger) as b,
        ):
            lines = [f"session-0:train:{n}" for n in range(40)]
            for line in lines:
                await b.create(line)
            requests = {line: UnloadModelRequest(model_id=line) for line in lines}
            ids = await asyncio.gather(
                *(b.submit(line, 1, "unload_model", request) for line, request in requests.items())
            )
            for request_id in ids:
                assert not isinstance(await b.result(request_id), RequestFailedResponse)
            return b.engine.capacity().adapters

    assert asyncio.run(run()) == 0
