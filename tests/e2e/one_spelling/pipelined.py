"""The same training loop, which submits all calls before it waits for the first."""

import asyncio

import tinker
from batches import batch


async def main() -> None:
    """Submit three steps, a save and what comes after it; then wait in the same order."""
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1)
    passes, steps = [], []
    for step in range(3):
        passes.append(training.forward_backward(batch(step), "cross_entropy"))
        steps.append(training.optim_step(tinker.AdamParams(learning_rate=1e-2)))
    creating = training.save_weights_and_get_sampling_client()
    saving = training.save_state("state")
    for step, output in enumerate(await asyncio.gather(*passes)):
        print(f"step {step}: {output.metrics['loss:sum']!r}")
    await asyncio.gather(*steps)

    sampler = await creating
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0)
    print(f"sampled {list((await sampler.sample(prompt, 1, params)).sequences[0].tokens)}")

    path = (await saving).path
    resumed = await service.create_training_client_from_state_with_optimizer(path)
    output = await resumed.forward(batch(0), "cross_entropy")
    print(f"resumed {output.metrics['loss:sum']!r}")
    run = await tinker.RestClient().get_training_run(training.model_id)
    print(f"run of {run.base_model}")
    await service.close()


asyncio.run(main())
