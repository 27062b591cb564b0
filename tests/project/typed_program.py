"""A program with types, as a user of the official names writes it; `mypy --strict` must pass it.

`assert_type` says what each call gives: a wrong or vague annotation of ours is an error here.
"""

from __future__ import annotations

import asyncio
from typing import assert_type

import tinsmith
from tinsmith import types


def train(client: tinsmith.ServiceClient) -> tinsmith.TrainingClient:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=8)
    assert_type(training, tinsmith.TrainingClient)
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
    look_around(tinsmith.RestClient())


if __name__ == "__main__":
    main()
