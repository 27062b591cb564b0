"""A training call of three chunks, one of which no service takes, and then two calls that it does.

python -m tests.e2e.service.refused_chunks tinker http://127.0.0.1:8000 1
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.e2e.service.served import BASE_MODEL

WAIT_S = 60.0
CHUNK = 1024
"""How many data a client puts into one chunk."""


def main(sdk: str, base_url: str, bad_chunk: int) -> None:
    """Print what became of the calls."""
    api = importlib.import_module(sdk)
    with api.ServiceClient(base_url=base_url, api_key="tml-chunks") as service:
        training = service.create_lora_training_client(base_model=BASE_MODEL, rank=4)
        data = _data(api, 2 * CHUNK + 1, bad=bad_chunk * CHUNK)
        refused = training.forward_backward(data, "cross_entropy")
        passed = training.forward_backward(_data(api, 1), "cross_entropy")
        stepped = training.optim_step(api.AdamParams())
        said = {"refused": "", "notes": ""}
        try:
            refused.result(timeout=WAIT_S)
        except api.BadRequestError as exc:
            said = {"refused": str(exc), "notes": " ".join(getattr(exc, "__notes__", ()))}
        passed.result(timeout=WAIT_S)
        stepped.result(timeout=WAIT_S)
    print(json.dumps(said))


def _data(api: Any, count: int, bad: int | None = None) -> list[Any]:
    """So many small data, of which one may hold a token that no model has."""
    return [
        api.Datum(
            model_input=api.ModelInput.from_ints([2**30 if number == bad else 1]),
            loss_fn_inputs={"target_tokens": [2], "weights": [1.0]},
        )
        for number in range(count)
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
