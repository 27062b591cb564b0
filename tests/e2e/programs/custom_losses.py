"""Losses of the program's own, in both ways."""

import asyncio

import tinker
from batches import batch


def squared(data, logprobs):
    total = sum((one**2).sum() for one in logprobs)
    return total, {"mine": float(total), "datums": float(len(data))}


async def main():
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3-8B", rank=4)
    for _ in range(2):
        forward = await training.forward_backward_custom_async(batch(1), squared)
        step = await training.optim_step_async(tinker.AdamParams(learning_rate=1e-4))
        output = await forward.result_async()
        await step.result_async()
        print({name: round(value, 3) for name, value in sorted(output.metrics.items())})

    def scaled(logprobs, weights):
        return -(logprobs * weights).sum(), {"custom/count:sum": weights.sum()}

    handle = await service.create_custom_loss(scaled, {"logprobs": 1, "weights": 1})
    print(handle.name, handle.input_names)
    forward = await training.forward_backward_custom_async(batch(2), handle)
    output = await forward.result_async()
    print({name: round(value, 3) for name, value in sorted(output.metrics.items())})


asyncio.run(main())
