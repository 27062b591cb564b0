"""A sampler that is pickled into the processes of a pool."""

import concurrent.futures
import multiprocessing

import tinker
from tinker import types
from tinker.lib.retry_handler import RetryConfig


def draw(sampler: tinker.SamplingClient, seed: int) -> list[int]:
    params = types.SamplingParams(max_tokens=4, seed=seed)
    result = sampler.sample(types.ModelInput.from_ints([seed, 2]), 1, params).result(timeout=60)
    assert isinstance(result, types.SampleResponse)
    return list(result.sequences[0].tokens)


if __name__ == "__main__":
    service = tinker.ServiceClient()
    config = RetryConfig(max_connections=4, retry_delay_base=0.01, progress_timeout=60)
    sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B", retry_config=config)
    print(config.retry_delay_max, config.enable_retry_logic, config == RetryConfig(4, 60, 0.01))
    here = [draw(sampler, seed) for seed in range(6)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        there = list(pool.map(draw, [sampler] * 6, range(6)))
    print(here)
    print(there == here)
