"""A typed program that uses the official names; `mypy --strict` must accept it.

`assert_type` says what each call gives: a wrong or vague annotation of ours is an error here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, TypeVar, assert_type

import tinsmith
from tinsmith import types

T = TypeVar("T")


def train(client: tinsmith.ServiceClient) -> tinsmith.TrainingClient:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=8)
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )
    passed = training.forward_backward([datum], "cross_entropy")
    output = assert_type(passed, tinsmith.APIFuture[tinsmith.ForwardBackwardOutput])
    step = training.optim_step(tinsmith.AdamParams(learning_rate=1e-4))
    assert_type(output.result(), tinsmith.ForwardBackwardOutput)
    assert_type(output.result().metrics, dict[str, float])
    assert_type(step.result(timeout=5.0), tinsmith.OptimStepResponse)
    assert_type(training.save_state("a").result().path, str)
    return training


async def train_async(training: tinsmith.TrainingClient, data: list[tinsmith.Datum]) -> float:
    submitted = await training.forward_backward_async(data, "cross_entropy")
    passing = assert_type(submitted, tinsmith.APIFuture[tinsmith.ForwardBackwardOutput])
    step = await training.optim_step_async(tinsmith.AdamParams())
    output = await passing
    assert_type(output, tinsmith.ForwardBackwardOutput)
    assert_type(await step, tinsmith.OptimStepResponse)
    return output.loss


async def sample(client: tinsmith.ServiceClient) -> list[int]:
    sampler = await client.create_sampling_client_async(base_model="Qwen/Qwen3-8B")
    assert_type(sampler, tinsmith.SamplingClient)
    prompt = tinsmith.ModelInput.from_ints([1, 2, 3])
    params = tinsmith.SamplingParams(max_tokens=8, temperature=0.5, stop=["\n"])
    answer = await sampler.sample_async(prompt, 2, params)
    assert_type(answer, tinsmith.SampleResponse)
    assert_type(sampler.sample(prompt, 1, params).result(), tinsmith.SampleResponse)
    assert_type(await sampler.compute_logprobs_async(prompt), list[float | None])
    async for event in sampler.sample_stream_async(prompt, 1, params):
        assert_type(event, tinsmith.SampleEvent)
    for sequence in answer.sequences:
        assert_type(sequence, tinsmith.SampledSequence)
        assert_type(sequence.stop_reason, tinsmith.StopReason)
    return list(answer.sequences[0].tokens)


def wait_for(future: tinsmith.APIFuture[T]) -> T:
    return future.result()


def create(client: tinsmith.ServiceClient, path: str) -> list[tinsmith.TrainingClient]:
    """What creates a client gives a future of it, which is also the client."""
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=8)
    assert_type(training.result(), tinsmith.TrainingClient)
    assert_type(training.model_id, str)
    assert_type(wait_for(training), tinsmith.TrainingClient)
    as_client: tinsmith.TrainingClient = training
    as_future: tinsmith.APIFuture[tinsmith.TrainingClient] = training
    resumed = client.create_training_client_from_state(path)
    assert_type(resumed.result(), tinsmith.TrainingClient)
    complete = client.create_training_client_from_state_with_optimizer(path)
    assert_type(complete.result(timeout=5.0), tinsmith.TrainingClient)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    assert_type(sampler.result(), tinsmith.SamplingClient)
    assert_type(training.create_sampling_client(path).result(), tinsmith.SamplingClient)
    saved = training.save_weights_and_get_sampling_client()
    assert_type(saved.result(), tinsmith.SamplingClient)
    if TYPE_CHECKING:
        training.no_such_method()  # type: ignore[attr-defined]  # not every name is a client's
    samplers: list[tinsmith.SamplingClient] = [sampler, saved, saved.result()]
    return [as_client, as_future.result(), resumed] if samplers else []


async def create_in_coroutine(client: tinsmith.ServiceClient, path: str) -> None:
    """The same calls, awaited."""
    training = await client.create_lora_training_client("Qwen/Qwen3-8B", rank=8)
    assert_type(training, tinsmith.TrainingClient)
    assert_type(await client.create_training_client_from_state(path), tinsmith.TrainingClient)
    sampler = await client.create_sampling_client(model_path=path)
    assert_type(sampler, tinsmith.SamplingClient)
    assert_type(await training.save_weights_and_get_sampling_client(), tinsmith.SamplingClient)
    assert_type(await training.optim_step(tinsmith.AdamParams()), tinsmith.OptimStepResponse)
    both = await asyncio.gather(
        client.create_lora_training_client("Qwen/Qwen3-8B"),
        client.create_sampling_client(base_model="Qwen/Qwen3-8B"),
    )
    assert_type(both, tuple[tinsmith.TrainingClient, tinsmith.SamplingClient])
    prompt = tinsmith.ModelInput.from_ints([1, 2, 3])
    asked = [sampler.sample(prompt, 1, tinsmith.SamplingParams()) for _ in range(4)]
    assert_type(await asyncio.gather(*asked), list[tinsmith.SampleResponse])
    task = asyncio.create_task(asked[0].coroutine())
    assert_type(await task, tinsmith.SampleResponse)
    standard: concurrent.futures.Future[tinsmith.SampleResponse] = asked[0].future()
    assert_type(standard.result(), tinsmith.SampleResponse)


def look_around(rest: tinsmith.RestClient) -> None:
    assert_type(rest.list_training_runs().result(), types.TrainingRunsResponse)
    for checkpoint in rest.iter_checkpoints():
        assert_type(checkpoint, tinsmith.Checkpoint)


def main() -> None:
    with tinsmith.ServiceClient(user_metadata={"run": "a"}) as client:
        try:
            training = train(client)
        except tinsmith.RateLimitError as error:
            assert_type(error.status_code, int)
            raise
        except tinsmith.RequestFailedError as error:
            assert_type(error.category, tinsmith.RequestErrorCategory)
            raise
        asyncio.run(train_async(training, []))
        asyncio.run(sample(client))
        create(client, "tinker://run/weights/1")
        asyncio.run(create_in_coroutine(client, "tinker://run/weights/1"))
    look_around(tinsmith.RestClient())


if __name__ == "__main__":
    main()
