"""An RL loop under a layer that records every sample, with many samples at a time."""

import asyncio
import functools
import inspect

import tinker

recorded = []


def capture(owner, name):
    original = getattr(owner, name)
    assert inspect.iscoroutinefunction(original)

    @functools.wraps(original)
    async def wrapper(self, *args, **kwargs):
        result = await original(self, *args, **kwargs)
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[0]
        recorded.append((prompt.to_ints(), len(result.sequences)))
        return result

    setattr(owner, name, wrapper)


capture(tinker.SamplingClient, "sample_async")


def datum(prompt, sequence, advantage):
    tokens = prompt + list(sequence.tokens)
    ahead = len(prompt) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * ahead + list(sequence.logprobs),
            "advantages": [0.0] * ahead + [advantage] * len(sequence.tokens),
        },
    )


async def rollouts(sampler, step):
    async def one(number):
        prompt = [number % 10 + 1, number // 10 + 1]
        result = await sampler.sample_async(
            prompt=tinker.ModelInput.from_ints(prompt),
            num_samples=2,
            sampling_params=tinker.SamplingParams(
                max_tokens=5, seed=1000 * step + number, temperature=1.0, stop=[3]
            ),
        )
        return prompt, result.sequences

    return await asyncio.gather(*(one(number) for number in range(100)))


async def main():
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3-8B", rank=4)
    for step in range(2):
        sampler = await training.save_weights_and_get_sampling_client_async()
        groups = await rollouts(sampler, step)
        data = [
            datum(prompt, sequence, 1.0 if sequence.tokens[0] % 2 else -1.0)
            for prompt, sequences in groups
            for sequence in sequences
        ]
        forward = await training.forward_backward_async(data, loss_fn="importance_sampling")
        update = await training.optim_step_async(tinker.AdamParams(learning_rate=1e-4))
        output = await forward.result_async()
        await update.result_async()
        print(sum(len(s.tokens) for _, group in groups for s in group))
        print(sorted({s.stop_reason for _, group in groups for s in group}))
        print(len(output.loss_fn_outputs), round(output.metrics["loss:sum"], 2))
    print(len(recorded), sorted(recorded)[:3])
    logprobs = await sampler.compute_logprobs_async(tinker.ModelInput.from_ints([1, 2, 3]))
    print([value if value is None else round(value, 4) for value in logprobs])
    print(await sampler.get_base_model_async())


asyncio.run(main())
