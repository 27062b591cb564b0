"""Samples as standard futures: callbacks, `as_completed` and `wait`; and as tasks."""

import asyncio
import concurrent.futures
import threading

import tinker

service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
prompt = tinker.ModelInput.from_ints([1, 2, 3])
params = tinker.SamplingParams(max_tokens=4, temperature=0.0)

called: list[int] = []
all_called = threading.Event()


def on_done(future: "concurrent.futures.Future[tinker.SampleResponse]") -> None:
    """Count the tokens of a sample, once it is drawn; may call the client again."""
    called.append(len(future.result().sequences[0].tokens))
    if len(called) == 1:
        sampler.sample(prompt, 1, params).result()
    if len(called) == 4:
        all_called.set()


standard = [sampler.sample(prompt, 1, params).future() for _ in range(4)]
for future in standard:
    future.add_done_callback(on_done)
completed = list(concurrent.futures.as_completed(standard, timeout=60))
print(f"{len(completed)} completed, callbacks called: {all_called.wait(60)}, {called}")


async def main() -> None:
    """The first of several tasks, and the rest of them cancelled."""
    tasks = [asyncio.create_task(sampler.sample(prompt, 1, params).coroutine()) for _ in range(4)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    print(f"a task gave {len(done.pop().result().sequences[0].tokens)} tokens")


asyncio.run(main())
service.close().result()
