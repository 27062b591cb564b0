"""A step of training with the official SDK, as a program of its own; its sockets outlive it."""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any

import tinker
from tinker import types


def main(base_url: str, api_key: str) -> None:
    """Train a step and print what came back."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=8)
    inputs: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    passed = client.forward_backward([datum] * 3, "cross_entropy")
    stepped = client.optim_step(types.AdamParams())
    seen: dict[str, Any] = {
        "loss": passed.result(timeout=30).metrics["loss:sum"],
        "step": stepped.result(timeout=30).metrics,
        "info": client.get_info().model_data.tokenizer_id,
        "models": [m.model_name for m in service.get_server_capabilities().supported_models],
    }
    sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
    params = types.SamplingParams(max_tokens=4, stop=[7])
    futures = [sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params) for _ in range(20)]
    clone = pickle.loads(pickle.dumps(sampler))
    futures.append(clone.sample(types.ModelInput.from_ints([1, 2]), 2, params))
    seen["tokens"] = [
        [list(sequence.tokens) for sequence in future.result(timeout=30).sequences]
        for future in futures
    ]
    seen["base_model"] = sampler.get_base_model()
    seen["saved"] = client.save_state("one").result(timeout=30).path.partition("/weights/")[2]
    service.close("success").result(timeout=30)
    print(json.dumps(seen), flush=True)
    # Threads of the SDK outlive its client: one process of a dozen aborted as Python ended.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
