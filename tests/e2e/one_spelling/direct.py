"""The same training loop on what the creation methods return, neither awaited nor asked.

Written for releases whose creation methods return clients. The first part runs as a script does,
the second as the cell of a notebook does: on an event loop, with calls that block it.
"""

import asyncio

import tinker
from batches import batch

service = tinker.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1)
for step in range(3):
    output = training.forward_backward(batch(step), "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    print(f"step {step}: {output.metrics['loss:sum']!r}")


async def cell() -> None:
    """Sample, save and resume."""
    sampler = training.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0)
    print(f"sampled {list((await sampler.sample_async(prompt, 1, params)).sequences[0].tokens)}")

    path = training.save_state("state").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    passed = await resumed.forward_async(batch(0), "cross_entropy")
    print(f"resumed {(await passed).metrics['loss:sum']!r}")
    run = await tinker.RestClient().get_training_run_async(training.model_id)
    print(f"run of {run.base_model}")


asyncio.run(cell())
service.close().result()
