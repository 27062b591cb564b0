"""An adapter leaves a service as files, comes to another by the standard calls, and is used."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.e2e.service.training_run import API_KEY, WAIT_S, datum_of
from tinsmith.types import AdamParams, LoraConfig, ModelInput, SamplingParams

DATA = [datum_of(random.Random(0))]
PROMPT = ModelInput.from_ints([4, 5, 6, 7, 8])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "service") as running:
        yield running


def rest(served: Served) -> tinsmith.RestClient:
    return tinsmith.RestClient(base_url=served.base_url, api_key=API_KEY)


def logprobs(training: tinsmith.TrainingClient) -> list[float]:
    result = training.forward(DATA, "cross_entropy").result(WAIT_S)
    return [float(value) for value in result.loss_fn_outputs[0]["logprobs"].tolist()]


def prompt_logprobs(service: tinsmith.ServiceClient, path: str) -> list[float | None]:
    sampler = service.create_sampling_client(path)
    return list(sampler.compute_logprobs(PROMPT).result(WAIT_S))


def export(served: Served, service: tinsmith.ServiceClient, folder: Path) -> tuple[str, Any]:
    """Train a little and fetch the adapter as a folder; its path, and the trained client."""
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    for _ in range(3):
        training.forward_backward(DATA, "cross_entropy").result(WAIT_S)
        training.optim_step(AdamParams(learning_rate=0.05)).result(WAIT_S)
    path = training.save_weights_external("out").result(WAIT_S).path
    urls = rest(served).get_external_weights_urls(path).result(WAIT_S).urls
    folder.mkdir()
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            (folder / name).write_bytes(reply.read())
    return path, training


def command(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TINKER_BASE_URL": served.base_url, "TINKER_API_KEY": API_KEY}
    return subprocess.run(
        [sys.executable, "-m", "tinsmith", "checkpoint", *words, "-f", "json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )


def test_an_adapter_of_another_service_samples_the_same_and_trains_on(tmp_path: Path) -> None:
    folder = tmp_path / "my adapter"
    with (
        serving(tmp_path / "one") as one,
        tinsmith.ServiceClient(base_url=one.base_url, api_key=API_KEY) as service,
    ):
        path, training = export(one, service, folder)
        trained, sampled = logprobs(training), prompt_logprobs(service, path)

    with (
        serving(tmp_path / "two") as two,
        tinsmith.ServiceClient(base_url=two.base_url, api_key=API_KEY) as service,
    ):
        done = command(two, "import", str(folder), "--metadata", "from=one")
        assert (done.returncode, done.stderr) == (0, "")
        shown = json.loads(done.stdout)
        path = shown["checkpoint_path"]
        base = prompt_logprobs(service, _untrained(service))
        training = service.create_training_client_from_state(path)
        imported = logprobs(training)
        training.forward_backward(DATA, "cross_entropy").result(WAIT_S)
        training.optim_step(AdamParams(learning_rate=0.05)).result(WAIT_S)

        assert prompt_logprobs(service, path) == sampled
        assert sampled != base
        assert imported == trained
        assert logprobs(training) != imported
        sampler = service.create_sampling_client(path)
        answer = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=3, seed=1)).result(WAIT_S)
        assert len(answer.sequences) == 1
        found = json.loads(command(two, "list", "--metadata", "from=one").stdout)["checkpoints"]
        assert [one["tinker_path"] for one in found] == [path]
    assert (shown["base_model"], shown["lora_rank"]) == (BASE_MODEL, 4)


def _untrained(service: tinsmith.ServiceClient) -> str:
    training = service.create_lora_training_client(BASE_MODEL, rank=4)
    return training.save_weights_for_sampler("untrained").result(WAIT_S).path


def test_an_upload_survives_a_kill_between_put_and_finish(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        path, _ = export(served, service, folder)
        expected = prompt_logprobs(service, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tinsmith.ExperimentalWarning)
        lora = LoraConfig(rank=4)
        started = rest(served).external_weights_upload_start(BASE_MODEL, lora).result(WAIT_S)
        for name, url in started.urls.items():
            body = (folder / name).read_bytes()
            request = urllib.request.Request(url, data=body, method="PUT")
            urllib.request.urlopen(request, timeout=WAIT_S).close()

        served.kill()
        before = list((served.folder / "data" / "checkpoints").glob("runs/upload*"))
        served.start()
        done = rest(served).external_weights_upload_finish(started.upload_id).result(WAIT_S)

    assert before == []
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        assert prompt_logprobs(service, done.tinker_path) == expected


def test_the_command_imports_into_the_embedded_service(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    with tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service:
        export(served, service, folder)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TINKER_")},
        "TINSMITH_HOME": str(tmp_path / "home"),
        "TINSMITH_SERVE_ENGINE": "fake",
        "TINSMITH_SERVE_MODELS": BASE_MODEL,
    }

    def run(*words: str) -> Any:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tinsmith", "checkpoint", *words),
                *("--base-url", "embedded", "-f", "json"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    path = run("import", str(folder), "--metadata", "a=b")["checkpoint_path"]
    found = run("list", "--metadata", "a=b")["checkpoints"]

    assert [one["tinker_path"] for one in found] == [path]
