"""A client of the chaos run: trains through one SDK or the other, and prints all its numbers.

    python -m tests.e2e.chaos.client_program tinker <model> <seed> <steps> <base url>...

Before each step it waits for a line of input, and prints a line after it. At the end it prints one
JSON object with everything that the service computed for it. All of that follows from the seed.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import traceback
from types import ModuleType
from typing import Any

from tests.e2e.service.training_run import API_KEY, WAIT_S

SAVE_EVERY = 4
SAMPLE_EVERY = 3
VOCABULARY = 300


class ChaosClient:
    """One training run."""

    def __init__(self, sdk: ModuleType, model: str, seed: int, urls: list[str]) -> None:
        self._sdk = sdk
        self._chance = random.Random(seed)
        self._seed = seed
        base_url: Any = urls if len(urls) > 1 else urls[0]
        self._service = sdk.ServiceClient(base_url=base_url, api_key=API_KEY)
        self._training = self._service.create_lora_training_client(model, rank=4, seed=seed)
        self.found: dict[str, list[Any]] = {"losses": [], "logprobs": [], "samples": []}

    def step(self, number: int) -> None:
        """Passes and an optimizer step in flight together; sometimes a save and samples."""
        passes = [
            self._training.forward_backward([self._datum() for _ in range(2)], "cross_entropy")
            for _ in range(self._chance.randint(1, 3))
        ]
        adam = self._sdk.types.AdamParams(learning_rate=0.01)
        stepped = self._training.optim_step(adam)
        saved = None
        if number % SAVE_EVERY == SAVE_EVERY - 1:
            saved = self._training.save_state(f"step-{number}")
        for one in passes:
            self._note(one.result(WAIT_S))
        stepped.result(WAIT_S)
        if saved is not None:
            saved.result(WAIT_S)
        if number % SAMPLE_EVERY == SAMPLE_EVERY - 1:
            self._sample()

    def finish(self) -> dict[str, Any]:
        """Save, take one more step from what was saved, and give all numbers."""
        path = self._training.save_state("last").result(WAIT_S).path
        resumed = self._service.create_training_client_from_state_with_optimizer(path)
        self._training, first = resumed, self._training
        self.step(0)
        self._note(first.forward([self._datum()], "cross_entropy").result(WAIT_S))
        weights = first.save_weights_for_sampler("last").result(WAIT_S).path
        return {**self.found, "state": path, "weights": weights}

    def _note(self, passed: Any) -> None:
        self.found["losses"].append(passed.metrics["loss:sum"])
        self.found["logprobs"] += [one["logprobs"].tolist() for one in passed.loss_fn_outputs]

    def _sample(self) -> None:
        sampler = self._training.save_weights_and_get_sampling_client()
        params = self._sdk.types.SamplingParams(
            max_tokens=6, seed=self._chance.randrange(1000), temperature=1.0
        )
        prompt = self._sdk.types.ModelInput.from_ints(self._tokens(4))
        answer = sampler.sample(prompt, 2, params).result(WAIT_S)
        for one in answer.sequences:
            self.found["samples"].append([list(one.tokens), list(one.logprobs)])

    def _datum(self) -> Any:
        types, tokens = self._sdk.types, self._tokens(self._chance.randint(4, 24))
        count = len(tokens) - 1
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
                "weights": types.TensorData(data=[1.0] * count, dtype="float32", shape=[count]),
            },
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(3, VOCABULARY) for _ in range(count)]


def main(sdk: str, model: str, seed: str, steps: str, *urls: str) -> None:
    """Run as the arguments say; the status is 1 if anything failed."""
    try:
        client = ChaosClient(importlib.import_module(sdk), model, int(seed), list(urls))
        for number in range(int(steps)):
            sys.stdin.readline()
            client.step(number)
            print("step", flush=True)
        sys.stdin.readline()
        print(json.dumps(client.finish()), flush=True)
    except BaseException:  # noqa: BLE001 - whatever it is, the process ends without more ado
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of the official SDK may crash the interpreter on its way out


if __name__ == "__main__":
    main(*sys.argv[1:])
