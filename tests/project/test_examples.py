"""Every example runs to completion and prints its findings."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

from tests.contract.test_tokenizers_like_transformers import qwen_files
from tests.e2e.service.served import serving
from tests.numerics.small_models import make_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOURS = ["client_tour", "service_tour", "wire_tour"]
TOLD_APART = ["resume_after_crash", "supervised", "two_tenants", "written_for_tinker"]
"""Examples with a test of their own output."""
EXAMPLES = [path.stem for path in sorted((ROOT / "examples").glob("*.py"))]
OTHERS = [name for name in EXAMPLES if name not in (*TOURS, *TOLD_APART)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the default model is a small random one."""
    folder = tmp_path_factory.mktemp("examples")
    make_model(folder / "model", "Qwen3", vocab_size=151_936, hidden_size=32, eos_token_id=151_645)
    for file in qwen_files().iterdir():
        shutil.copy(file, folder / "model")
    ours = {"TINSMITH_HOME": str(folder / "home")}
    ours["TINSMITH_SERVE_MODELS"] = f"{NAME}={folder / 'model'}"
    kept = {name: value for name, value in os.environ.items() if "TINKER_" not in name}
    return {**kept, **ours}


def _said(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment or None,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_describes_an_example_and_starts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")

    said = capsys.readouterr().out
    about = program.read_text(encoding="utf-8").splitlines()[0].strip('"')
    assert ended.value.code == 0
    assert said.startswith("usage: ")
    assert about in " ".join(said.split())


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_runs(name: str) -> None:
    said = _said(str(ROOT / "examples" / f"{name}.py"))

    assert len(said.splitlines()) > 5


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_runs_on_a_small_model(name: str, home: dict[str, str]) -> None:
    short = "--prompts=12" if name == "many_samples" else "--steps=3"
    said = _said(str(ROOT / "examples" / f"{name}.py"), short, **home)

    assert len(said.splitlines()) >= 4


def test_a_loop_over_examples_lowers_the_loss(home: dict[str, str]) -> None:
    said = _said(str(ROOT / "examples" / "supervised.py"), "--steps=4", **home)

    losses = [float(found) for found in re.findall(r"loss per token (\S+)", said)]
    assert losses[-1] < losses[0]


def test_a_killed_program_is_resumed(home: dict[str, str]) -> None:
    """The step during which the program was killed gives the same loss when it is repeated."""
    said = _said(str(ROOT / "examples" / "resume_after_crash.py"), **home)

    third = re.findall(r"step 3(?: again)?: loss (\d+\.\d+)", said)
    assert len(third) == 2 and third[0] == third[1]
    assert "SIGKILL" in said


def test_tenants_cannot_see_each_other(home: dict[str, str]) -> None:
    said = _said(str(ROOT / "examples" / "two_tenants.py"), **home)

    assert said.count("sees 1 run") == 2
    assert "bob's checkpoint: NotFoundError" in said


def test_a_program_for_tinker_runs_on_both_clients(
    home: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """On our client as `tinker`, and on the official client against our service."""
    program = str(ROOT / "examples" / "written_for_tinker.py")
    model = home["TINSMITH_SERVE_MODELS"]

    ours = _said("-m", "tinsmith.as_tinker", program, **home)
    with serving(tmp_path, engine="embedded", model=model) as service:
        official = _said(
            program, **home, TINKER_BASE_URL=service.base_url, TINKER_API_KEY="tml-example"
        )

    assert ours.startswith("client: tinsmith")
    assert official.startswith("client: tinker")
    assert ours.splitlines()[1:] == official.splitlines()[1:]


def test_the_tour_of_the_client_survives_its_faults() -> None:
    tour = ROOT / "examples" / "client_tour.py"

    said = subprocess.run(
        [sys.executable, str(tour)], capture_output=True, text=True, timeout=300, check=True
    ).stdout

    assert "[1, 3, 3, 5]: sent twice, run once" in said
    assert "500 responses" in said
    assert "over 2 connections; equal to the whole response: True" in said
    assert "ended the session, with 1 request" in said


def test_the_service_tour_loses_nothing_when_the_service_is_killed() -> None:
    tour = ROOT / "examples" / "service_tour.py"

    said = subprocess.run(
        [sys.executable, str(tour)], capture_output=True, text=True, timeout=600, check=True
    ).stdout

    assert "killed; the client does not know" in said
    assert "commands were repeated" in said
    assert "are bit-identical" in said
