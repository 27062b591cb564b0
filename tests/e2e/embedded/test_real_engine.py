"""The embedded service with the engine that is its default, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.embedded.programs import ENDS_WITHIN_S, environment, run
from tests.numerics.small_models import make_model

TOKENS, TARGETS = [1, 2, 3, 4], [2, 3, 4, 5]
START = f"""
import json
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints({TOKENS}), {{"target_tokens": {TARGETS}, "weights": [1.0] * 4}}
)
def logprobs_of(training):
    output = training.forward([DATUM], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """A small model; the engine is the default, in a type whose numbers others can be held to."""
    make_model(tmp_path / "base")
    return {
        "TINSMITH_SERVE_ENGINE": "",
        "TINSMITH_SERVE_MODELS": f"small={tmp_path / 'base'}",
        "TINSMITH_SERVE_DTYPE": "float32",
    }


def test_a_real_model_trains_in_process_and_is_exported_merged(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """Trained, saved, gone on with in the next run, and exported as a model that others load."""
    first = run(
        f"""{START}
training = tinsmith.ServiceClient().create_lora_training_client("small", rank=4, seed=1)
before = logprobs_of(training)
for _ in range(5):
    step(training)
after = logprobs_of(training)
assert sum(after) > sum(before) + 1, (before, after)
say(training.save_state("learned").result().path)
say(json.dumps(after))
""",
        tmp_path,
        **settings,
    )
    path, after = first.stdout.splitlines()
    assert "engine embedded" in first.stderr

    run(
        f"""{START}
client = tinsmith.ServiceClient()
training = client.create_training_client_from_state_with_optimizer({path!r})
assert logprobs_of(training) == {after}
sampler = training.save_weights_and_get_sampling_client()
params = tinsmith.SamplingParams(max_tokens=1, temperature=0.0)
answer = sampler.sample(DATUM.model_input, 1, params).result()
assert list(answer.sequences[0].tokens) == [{TARGETS[-1]}], answer.sequences[0].tokens
""",
        tmp_path,
        **settings,
    )

    merged = tmp_path / "merged"
    words = ["checkpoint", "merge", path, "--base-url", "embedded", "-o", str(merged)]
    words += ["--base-model", str(tmp_path / "base")]
    ended = subprocess.run(
        [sys.executable, "-m", "tinsmith", *words],
        env=environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    torch.testing.assert_close(
        logprobs_of_folder(merged), torch.tensor(json.loads(after)), rtol=1e-3, atol=1e-3
    )


def logprobs_of_folder(folder: Path) -> torch.Tensor:
    """As `transformers` computes them, with no adapter."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    chosen_T: torch.Tensor = logprobs_TV[torch.arange(len(TARGETS)), torch.tensor(TARGETS)]
    return chosen_T
