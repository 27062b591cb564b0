"""Adapters downloaded from a service, in `peft`: found, loaded, merged, and brought back."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tinsmith
from tests.e2e.service.served import Served, serving
from tests.numerics.small_models import make_model
from tinsmith import types

NAME = "mine"
WAIT_S = 120.0
TOKENS = [5, 9, 7, 30, 4, 11]
INPUTS: dict[str, Any] = {"target_tokens": TOKENS[1:], "weights": [1.0] * 5}
DATUM = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=INPUTS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose output layer is its embedding."""
    folder = tmp_path_factory.mktemp("base")
    make_model(folder, "Llama", vocab_size=300)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


@pytest.fixture(scope="module")
def served(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    how = ("--threads", "1", "--dtype", "float32")
    with serving(folder, *how, engine="embedded", model=f"{NAME}={base}") as running:
        yield running


@pytest.fixture(scope="module")
def trained(served: Served) -> tuple[str, list[float]]:
    """A checkpoint, and the log-probabilities of the tokens by it."""
    with tinsmith.ServiceClient(base_url=served.base_url, api_key="tml-x") as service:
        client = service.create_lora_training_client(NAME, rank=4, seed=3)
        for _ in range(4):
            passed = client.forward_backward([DATUM], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=0.05)).result(WAIT_S)
            passed.result(WAIT_S)
        output = client.forward([DATUM], "cross_entropy").result(WAIT_S)
        path = client.save_state("done").result(WAIT_S).path
        return path, output.loss_fn_outputs[0]["logprobs"].tolist()


def command(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TINKER_BASE_URL": served.base_url, "TINKER_API_KEY": "tml-x"}
    return subprocess.run(
        [sys.executable, "-m", "tinsmith", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=environment,
    )


def downloaded(served: Served, path: str, into: Path, *options: str) -> Path:
    done = command(served, "checkpoint", "download", path, "-o", str(into), *options)
    assert done.returncode == 0, done.stderr
    [folder] = into.iterdir()
    return folder


def logprobs(model: Any) -> list[float]:
    """Of each token after the first."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([TOKENS[:-1]])).logits[0]
    chosen: list[float] = (
        torch.log_softmax(logits_TV.float(), -1)
        .gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        .tolist()
    )
    return chosen


def loaded(folder: Path) -> Any:
    """The adapter with the base model that its own settings name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = importlib.import_module("peft")
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_peft_finds_the_base_model_and_merges_the_trained_adapter(
    served: Served, trained: tuple[str, list[float]], tmp_path: Path
) -> None:
    """Also where the output layer is the embedding, and after it was saved and loaded again."""
    path, expected = trained
    model = loaded(downloaded(served, path, tmp_path / "out"))
    beside = logprobs(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        again = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        )

    assert beside == pytest.approx(expected, abs=1e-4)
    assert logprobs(merged) == pytest.approx(expected, abs=1e-4)
    assert logprobs(again) == pytest.approx(expected, abs=1e-4)


def test_the_output_layer_stays_lora_for_vllm(
    served: Served, trained: tuple[str, list[float]], tmp_path: Path
) -> None:
    """VLLM refuses an adapter with `modules_to_save`."""
    path, expected = trained
    folder = downloaded(served, path, tmp_path, "--for", "vllm")

    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    assert "lm_head" in config["target_modules"]
    assert logprobs(loaded(folder)) == pytest.approx(expected, abs=1e-4)


def test_without_the_base_model_no_adapter_that_would_merge_wrongly_is_written(
    served: Served, trained: tuple[str, list[float]], base: Path, tmp_path: Path
) -> None:
    path, _ = trained
    arguments = ("checkpoint", "download", path, "-o", str(tmp_path), "--base-model")

    refused = command(served, *arguments, "somebody/else")
    assert refused.returncode != 0
    assert "--for vllm" in refused.stderr
    assert not [folder for folder in tmp_path.iterdir() if folder.suffix != ".partial"]

    done = command(served, *arguments, str(base))
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.iterdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_a_downloaded_adapter_can_be_imported_again_unchanged(
    served: Served, trained: tuple[str, list[float]], tmp_path: Path
) -> None:
    path, expected = trained
    folder = downloaded(served, path, tmp_path)

    done = command(served, "checkpoint", "import", str(folder), "-f", "json")

    assert done.returncode == 0, done.stderr
    with tinsmith.ServiceClient(base_url=served.base_url, api_key="tml-x") as service:
        back = json.loads(done.stdout)["checkpoint_path"]
        client = service.create_training_client_from_state(back)
        output = client.forward([DATUM], "cross_entropy").result(WAIT_S)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected, abs=1e-5)
