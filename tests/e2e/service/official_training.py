"""Run by the unmodified official SDK, in a process of its own: a training run with known numbers.

    python -m tests.e2e.service.official_training <base url> <seed> <steps>

Prints a line after each step, and at the end one JSON list with what the model makes of a fixed
text.
"""

from __future__ import annotations

import json
import random
import sys

import tinker
from tinker import types

from tests.e2e.service.served import BASE_MODEL


def main(base_url: str, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-any")
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed)
    for step in range(steps):
        passed = training.forward_backward([datum_of(chance)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.05))
        passed.result()
        stepped.result()
        print(f"step {step}", flush=True)
    saved = training.save_state("last").result().path
    resumed = service.create_training_client_from_state(saved)
    probe = resumed.forward([datum_of(random.Random(0))], "cross_entropy").result()
    print(json.dumps(probe.loss_fn_outputs[0]["logprobs"].tolist()), flush=True)


def datum_of(chance: random.Random) -> types.Datum:
    tokens = [chance.randrange(1000) for _ in range(chance.randint(3, 12))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
        },
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
