"""An adapter leaves a service as a PEFT folder, comes back by `upload`, and is trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import tinsmith
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tinsmith import types

INPUTS: dict[str, Any] = {"target_tokens": [5, 6, 7], "weights": [1.0, 1.0, 1.0]}
DATUM = types.Datum(model_input=types.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs=INPUTS)


def losses(client: tinsmith.TrainingClient, steps: int) -> list[float]:
    """The loss before each of some steps."""
    found = []
    for _ in range(steps):
        passed = client.forward_backward([DATUM], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1)).result(60)
        found.append(passed.result(60).metrics["loss:sum"])
    return found


def brought(served: Served, folder: Path) -> dict[str, Any]:
    """What `tinsmith checkpoint upload` says."""
    environment = {**os.environ, "TINKER_BASE_URL": served.base_url, "TINKER_API_KEY": "tml-x"}
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith", "checkpoint", "upload", str(folder), "-f", "json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_training_goes_on_from_an_adapter_of_another_service(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    with (
        serving(tmp_path / "one") as one,
        tinsmith.ServiceClient(base_url=one.base_url, api_key="tml-x") as service,
    ):
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        before = losses(client, 3)
        path = client.save_weights_external("out").result(60).path
        rest = tinsmith.RestClient(base_url=one.base_url, api_key="tml-x")
        urls = rest.get_external_weights_urls(path).result(60).urls
        for name, url in urls.items():
            with urllib.request.urlopen(url, timeout=60) as reply:
                (folder / name).write_bytes(reply.read())
        expected = client.forward([DATUM], "cross_entropy").result(60).metrics["loss:sum"]

    with (
        serving(tmp_path / "two") as two,
        tinsmith.ServiceClient(base_url=two.base_url, api_key="tml-x") as service,
    ):
        told = brought(two, folder)
        client = service.create_training_client_from_state(told["tinker_path"])
        after = losses(client, 3)

    assert told["lora_rank"] == 4
    assert abs(after[0] - expected) < 1e-5
    assert after[0] < before[0]
    assert after[-1] < after[0]
