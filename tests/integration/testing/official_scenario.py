"""A whole working day of the official SDK, run as a program of its own.

Its threads and sockets outlive it, and its warnings are not ours: hence another process. It prints
one JSON object with what it saw for each service that it is given; the test looks at the services
for what was sent.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

import tinker
from tinker import types

BASE_MODEL = "Qwen/Qwen3-8B"
ABANDONED_LENGTH = 77
"""The service is asked to hold back samples of this length."""


def datum(tokens: list[int]) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(client: tinker.TrainingClient) -> list[float]:
    """Three steps on five datums, sent in chunks."""
    data = [datum([n, n + 1, n + 2, n + 3]) for n in range(5)]
    losses = []
    for _ in range(3):
        forward = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-4))
        output = forward.result(timeout=30)
        assert len(output.loss_fn_outputs) == len(data)
        losses.append(output.metrics["loss:sum"])
        step.result(timeout=30)
    return losses


def custom_loss(client: tinker.TrainingClient) -> float:
    """A loss that runs in the client and sends back its gradient."""

    def squared(_: Any, logprobs: Any) -> Any:
        total = sum((lp**2).sum() for lp in logprobs)
        return total, {"custom": float(total)}

    output = client.forward_backward_custom([datum([7, 8, 9])], squared).result(timeout=30)
    client.optim_step(types.AdamParams()).result(timeout=30)
    return output.metrics["custom"]


def sample(client: tinker.SamplingClient) -> dict[str, Any]:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.7, top_k=20, stop=[])
    response = client.sample(
        prompt=prompt,
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result(timeout=30)
    clone = pickle.loads(pickle.dumps(client))
    again = clone.sample(prompt=prompt, num_samples=2, sampling_params=params).result(timeout=30)
    return {
        "tokens": [list(sequence.tokens) for sequence in response.sequences],
        "clone_tokens": [list(sequence.tokens) for sequence in again.sequences],
        "reasons": [sequence.stop_reason for sequence in response.sequences],
        "prompt_logprobs": response.prompt_logprobs,
        "topk": [row and len(row) for row in response.topk_prompt_logprobs or []],
        "computed": client.compute_logprobs(prompt).result(timeout=30),
        "base_model": client.get_base_model(),
    }


async def abandon(client: tinker.SamplingClient) -> None:
    """Give up on a sample that the service holds back."""
    params = types.SamplingParams(max_tokens=ABANDONED_LENGTH)
    waiting = client.sample_async(types.ModelInput.from_ints([1]), 1, params)
    try:
        await asyncio.wait_for(waiting, timeout=0.3)
    except TimeoutError:
        return
    raise AssertionError("the sample was to be held back")


def manage(base_url: str, api_key: str, path: str, model_id: str) -> dict[str, Any]:
    rest = tinker.RestClient(base_url=base_url, api_key=api_key)
    rest.publish_checkpoint_from_tinker_path(path).result(timeout=30)
    rest.set_checkpoint_ttl_from_tinker_path(path, 4000).result(timeout=30)
    shown = rest.list_user_checkpoints().result(timeout=30).checkpoints
    info = rest.get_weights_info_by_tinker_path(path).result(timeout=30)
    runs = rest.list_training_runs().result(timeout=30)
    run = rest.get_training_run(model_id).result(timeout=30)
    rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=30)
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=30)
    left = rest.list_checkpoints(model_id).result(timeout=30).checkpoints
    return {
        "published": [checkpoint.tinker_path for checkpoint in shown if checkpoint.public],
        "rank": info.lora_rank,
        "runs": [one.training_run_id for one in runs.training_runs],
        "run": run.base_model,
        "left": [checkpoint.tinker_path for checkpoint in left],
        "sessions": rest.list_sessions().result(timeout=30).sessions,
    }


def main(base_url: str, api_key: str) -> None:
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key, user_metadata={"a": "b"})
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    seen: dict[str, Any] = {"losses": train(client), "custom": custom_loss(client)}
    path = client.save_state("c1").result(timeout=30).path
    named = client.save_weights_for_sampler("s1").result(timeout=30).path
    sampler = client.save_weights_and_get_sampling_client()
    seen["sample"] = sample(sampler)
    asyncio.run(abandon(sampler))
    seen["named"] = list(
        service.create_sampling_client(model_path=named)
        .sample(
            types.ModelInput.from_ints([1, 2, 3]), 1, types.SamplingParams(max_tokens=2, seed=1)
        )
        .result(timeout=30)
        .sequences[0]
        .tokens
    )
    resumed = service.create_training_client_from_state(path)
    seen["resumed"] = (
        resumed.forward([datum([7, 8, 9])], "cross_entropy").result(timeout=30).metrics
    )
    seen["original"] = (
        client.forward([datum([7, 8, 9])], "cross_entropy").result(timeout=30).metrics
    )
    info = client.get_info()
    seen["info"] = [info.model_id, info.model_data.model_name, info.lora_rank]
    models = service.get_server_capabilities().supported_models
    seen["models"] = [model.model_name for model in models]
    seen["rest"] = manage(base_url, api_key, path, info.model_id)
    service.close("success", detail="done").result(timeout=30)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    for service_url in sys.argv[2:]:
        main(service_url, sys.argv[1])
