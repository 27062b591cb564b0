"""One client of several at a service: trains, samples, saves, publishes, and reads another's work.

    python -m tests.e2e.service.in_company tinker 1 2 /tmp/notices

The service is named by `TINKER_BASE_URL` and `TINKER_API_KEY`. Written for what all releases of the
official SDK and our client share. All numbers follow from the seed. Each step that is done is a
line on standard output; the last line is what came of it all.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.e2e.service.served import BASE_MODEL
from tests.e2e.service.training_run import WAIT_S

STEPS = 8
PUBLISHED_AFTER = 5
"""Steps before the checkpoint that others read."""


def main(name: str, seed: str, other: str, notices: str) -> None:
    """Run as client number `seed`, and read what client number `other` publishes."""
    sdk = importlib.import_module(name)
    service = sdk.ServiceClient()
    client = Client(sdk, service, int(seed))
    client.train(PUBLISHED_AFTER)
    client.publish(Path(notices) / seed)
    client.read(Path(notices) / other)
    client.train(STEPS - PUBLISHED_AFTER)
    client.tell()
    os._exit(0)  # threads of the official SDK may crash the interpreter on its way out


class Client:
    """A run of training, and what it has used so far."""

    def __init__(self, sdk: ModuleType, service: Any, seed: int) -> None:
        self._sdk = sdk
        self._service = service
        self._chance = random.Random(seed)
        self._training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed)
        self._losses: list[float] = []
        self._samples: list[Any] = []
        self._read: list[Any] = []
        self._asked: dict[str, int] = {}
        self._used = {"training": 0, "sampling_prefill": 0, "sampling_sample": 0, "checkpoint": 0}

    def train(self, steps: int) -> None:
        """Passes are submitted together with their step; each second step is saved and sampled."""
        for _ in range(steps):
            passes = [
                self._training.forward_backward([self._datum(), self._datum()], "cross_entropy")
                for _ in range(self._chance.randint(1, 3))
            ]
            stepped = self._training.optim_step(self._sdk.types.AdamParams(learning_rate=1e-2))
            self._losses += [one.result(WAIT_S).metrics["loss:sum"] for one in passes]
            stepped.result(WAIT_S)
            self._count(forward_backward=len(passes), optim_step=1)
            if len(self._losses) % 2:
                self._sample_what_is_learned()
            print(json.dumps({"losses": len(self._losses)}), flush=True)

    def _sample_what_is_learned(self) -> None:
        name = f"after-{len(self._losses)}"
        saved = self._training.save_weights_for_sampler(name).result(WAIT_S)
        self._count(save_weights_for_sampler=1)
        self._used["checkpoint"] += 1
        self._samples.append(self._sample(saved.path, seed=len(self._losses)))

    def publish(self, notice: Path) -> None:
        """Save what is learned in both forms, let everybody read it, and say where it is."""
        state = self._training.save_state("published").result(WAIT_S).path
        weights = self._training.save_weights_for_sampler("published").result(WAIT_S).path
        self._count(save_weights=1, save_weights_for_sampler=1)
        self._used["checkpoint"] += 2
        rest = self._service.create_rest_client()
        for path in (state, weights):
            rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
        written = notice.with_suffix(".new")
        written.write_text(json.dumps([state, weights]))
        written.replace(notice)  # it is never half there

    def read(self, notice: Path) -> None:
        """Sample from what a client published, and train on from it."""
        give_up_at = time.monotonic() + WAIT_S
        while not notice.exists():
            assert time.monotonic() < give_up_at, f"{notice} was not published"
            time.sleep(0.01)
        state, weights = json.loads(notice.read_text())
        self._read.append(self._sample(weights, seed=0))
        resumed = self._service.create_training_client_from_state(state)
        for _ in range(2):
            data = [self._datum_of([5, 6, 7, 8, 9])]
            loss = resumed.forward_backward(data, "cross_entropy").result(WAIT_S)
            resumed.optim_step(self._sdk.types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
            self._read.append(loss.metrics["loss:sum"])
        self._count(forward_backward=2, optim_step=2)

    def _sample(self, path: str, seed: int) -> list[Any]:
        types = self._sdk.types
        prompt = [5, 6, 7, 8]
        sampler = self._service.create_sampling_client(model_path=path)
        params = types.SamplingParams(max_tokens=12, seed=seed, temperature=1.0)
        answer = sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result(WAIT_S)
        # As float32: of those, JSON holds as many digits as tell them apart.
        said = [(list(one.tokens), list(array("f", one.logprobs))) for one in answer.sequences]
        self._count(asample=1)
        self._used["sampling_prefill"] += len(prompt)
        self._used["sampling_sample"] += sum(len(tokens) for tokens, _ in said)
        return said

    def _datum(self) -> Any:
        count = self._chance.randint(3, 12)
        return self._datum_of([self._chance.randrange(1000) for _ in range(count)])

    def _datum_of(self, tokens: list[int]) -> Any:
        count = len(tokens) - 1
        self._used["training"] += count
        inputs = {
            "target_tokens": self._tensor(tokens[1:], "int64"),
            "weights": self._tensor([1.0] * count, "float32"),
        }
        text = self._sdk.types.ModelInput.from_ints(tokens[:-1])
        return self._sdk.types.Datum(model_input=text, loss_fn_inputs=inputs)

    def _tensor(self, values: list[Any], dtype: str) -> Any:
        return self._sdk.types.TensorData(data=values, dtype=dtype, shape=[len(values)])

    def _count(self, **asked: int) -> None:
        for kind, count in asked.items():
            self._asked[kind] = self._asked.get(kind, 0) + count

    def tell(self) -> None:
        """What was computed for it, what it asked for and what it used by its own count."""
        told = {
            "losses": self._losses,
            "samples": self._samples,
            "read": self._read,
            "asked": self._asked,
            "used": self._used,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
