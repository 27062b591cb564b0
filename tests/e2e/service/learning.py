"""Teaches a model a text through one SDK or the other, and prints what came of it.

python -m tests.e2e.service.learning tinker http://127.0.0.1:8000
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

from tests.e2e.service.served import BASE_MODEL
from tests.e2e.service.training_run import API_KEY, WAIT_S

TEXT = [5, 6, 7, 8, 9, 10]
STEPS = 12


def main(name: str, base_url: str) -> None:
    """Train, save, sample, and train on from what was saved."""
    sdk = importlib.import_module(name)
    service = sdk.ServiceClient(base_url=base_url, api_key=API_KEY)
    training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1)
    losses = [_step(sdk, training) for _ in range(STEPS)]
    state = training.save_state("learned").result(WAIT_S).path
    sampler = training.save_weights_and_get_sampling_client()
    greedy = sdk.types.SamplingParams(max_tokens=len(TEXT) - 1, temperature=0.0)
    prompt = sdk.types.ModelInput.from_ints(TEXT[:1])
    answer = sampler.sample(prompt, 2, greedy).result(WAIT_S)
    resumed = service.create_training_client_from_state_with_optimizer(state)
    learned = {
        "losses": losses,
        "said": [list(one.tokens) for one in answer.sequences],
        "resumed": [_step(sdk, resumed) for _ in range(2)],
        "went_on": [_step(sdk, training) for _ in range(2)],
    }
    print(json.dumps(learned), flush=True)
    os._exit(0)  # threads of the official SDK may crash the interpreter on its way out


def _step(sdk: ModuleType, training: Any) -> float:
    datum = sdk.types.Datum(
        model_input=sdk.types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={
            "target_tokens": _tensor(sdk, TEXT[1:], "int64"),
            "weights": _tensor(sdk, [1.0] * (len(TEXT) - 1), "float32"),
        },
    )
    passed = training.forward_backward([datum], "cross_entropy")
    stepped = training.optim_step(sdk.types.AdamParams(learning_rate=1e-2))
    loss: float = passed.result(WAIT_S).metrics["loss:sum"]
    stepped.result(WAIT_S)
    return loss


def _tensor(sdk: ModuleType, data: list[Any], dtype: str) -> Any:
    return sdk.types.TensorData(data=data, dtype=dtype, shape=[len(data)])


if __name__ == "__main__":
    main(*sys.argv[1:])
