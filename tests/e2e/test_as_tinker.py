"""Programs written for tinker, run on tinsmith as they are."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tinsmith.testing import running_service

PROGRAM = """
import sys

import tinker
from tinker import types
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.types import LossFnType, ModelInput
from tinker.types.tensor_data import TensorData

client = tinker.ServiceClient()
training = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=8)
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens=[1, 2, 3]),
    loss_fn_inputs=dict(
        weights=TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3]),
        target_tokens=[2, 3, 4],
    ),
)
losses = []
for _ in range(2):
    forward = training.forward_backward([datum], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    assert isinstance(forward, APIFuture)
    losses.append(forward.result().metrics["loss:sum"])
    step.result()
assert losses[1] < losses[0]
sampler = training.save_weights_and_get_sampling_client(name="s")
params = types.SamplingParams(max_tokens=4, temperature=0.0)
prompt = ModelInput.from_ints([1, 2])
response = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params)
print(len(response.result().sequences), sys.argv[1:], tinker.__version__)
try:
    RestClient().get_training_run("nobody").result()
except (tinker.TinkerError, ValueError) as error:
    assert isinstance(error, tinker.NotFoundError)
assert "tinsmith" in tinker.ServiceClient.__module__
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_program_for_tinker_runs_unchanged(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    with running_service() as service:
        finished = run(
            ["-m", "tinsmith.as_tinker", str(script), "--lr", "1"],
            TINKER_BASE_URL=service.base_url,
            TINKER_API_KEY=service.api_key,
        )

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split("\n")[0] == "2 ['--lr', '1'] 0.36.0"
    assert service.requests("finish_session")


def test_as_tinker_can_be_called_inside_a_program() -> None:
    program = (
        "import tinsmith; tinsmith.as_tinker(); tinsmith.as_tinker(); import tinker; "
        "print(tinker.Datum is tinsmith.Datum, tinker.types.Datum is tinsmith.Datum)"
    )

    assert run(["-c", program]).stdout.strip() == "True True"


def test_a_program_run_with_as_tinker_may_call_as_tinker_again(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, tinsmith, tinker\n"
        "tinsmith.as_tinker()\n"
        "print(tinker.Datum is tinsmith.Datum)\n"
        "print(sum(type(finder).__module__ == 'tinsmith.as_tinker' for finder in sys.meta_path))\n"
    )

    finished = run(["-m", "tinsmith.as_tinker", str(script)])

    assert finished.stdout.split() == ["True", "1"], finished.stderr


def test_an_official_package_that_is_already_imported_is_not_replaced() -> None:
    program = "import tinker, tinsmith; tinsmith.as_tinker()"

    finished = run(["-c", program])

    assert finished.returncode != 0
    assert "before the first" in finished.stderr


@pytest.mark.parametrize(
    "statement",
    ["import tinker.no_such_module", "from tinker import no_such_name"],
)
def test_modules_that_tinsmith_does_not_have_cannot_be_imported(statement: str) -> None:
    finished = run(["-c", f"import tinsmith; tinsmith.as_tinker(); {statement}"])

    assert finished.returncode != 0
    assert "ImportError" in finished.stderr or "ModuleNotFoundError" in finished.stderr


def test_help_says_how_to_use_it() -> None:
    assert (
        "usage: python -m tinsmith.as_tinker" in run(["-m", "tinsmith.as_tinker", "--help"]).stdout
    )
