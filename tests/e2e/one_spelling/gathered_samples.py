"""A thousand samples at once, gathered by a coroutine."""

import asyncio

import tinker

COUNT = 1000


async def main() -> None:
    """Sample with a seed for each prompt, twice; the same seed gives the same tokens."""
    service = tinker.ServiceClient()
    sampler = await service.create_sampling_client(base_model="Qwen/Qwen3-8B")

    def draw(number: int) -> "tinker.APIFuture[tinker.SampleResponse]":
        prompt = tinker.ModelInput.from_ints([1 + number % 40, 2, 3])
        params = tinker.SamplingParams(max_tokens=2, temperature=1.0, seed=number)
        return sampler.sample(prompt, num_samples=1, sampling_params=params)

    drawn = await asyncio.gather(*[draw(number) for number in range(COUNT)])
    tokens = [tuple(one.sequences[0].tokens) for one in drawn]
    print(f"{len(tokens)} samples, {min(map(len, tokens))} to {max(map(len, tokens))} tokens")
    again = await asyncio.gather(*[draw(number).coroutine() for number in (0, 500, 999)])
    same = [tuple(one.sequences[0].tokens) for one in again] == [
        tokens[number] for number in (0, 500, 999)
    ]
    print(f"the same again: {same}")
    await service.close()


asyncio.run(main())
