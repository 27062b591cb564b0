"""`tinsmith workshop`: programs run in the folder that it makes, and ask nobody for anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.errors import ValidationError
from tinsmith.model_files.workshop import NAMES, make_workshop

ENDS_WITHIN_S = 240.0

PROGRAM = """
import tinker
from tinker import types
from transformers import AutoTokenizer

for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"):
    by_name = AutoTokenizer.from_pretrained(name)
    chat = [{"role": "user", "content": "Wie geht’s?"}]
    text = by_name.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = by_name.encode(text, add_special_tokens=False)
    assert by_name.decode(ids) == text

    training = tinker.ServiceClient().create_lora_training_client(base_model=name, rank=4)
    assert training.get_tokenizer().encode(text, add_special_tokens=False) == ids
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )
    losses = []
    for _ in range(3):
        output = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(output.result().metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True), losses
    sampler = training.save_weights_and_get_sampling_client(name="w")
    params = types.SamplingParams(max_tokens=5, stop=[by_name.eos_token])
    answer = sampler.sample(types.ModelInput.from_ints(ids), 1, params).result()
    by_name.decode(answer.sequences[0].tokens)
print("well")
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """Made by the command."""
    folder = tmp_path / "workshop"
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "workshop", str(folder), "-f", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout)["environment"].keys() == {"TINKER_BASE_URL", "TINKER_API_KEY"}
    return folder


def test_a_program_for_the_official_sdk_runs_in_it_with_no_hub(
    workshop: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "TINKER_API_KEY": "tml-workshop",
    }
    serve = [sys.executable, "-m", "tinsmith", "serve", "--config", "tinsmith.toml", "--port", "0"]
    with subprocess.Popen(
        serve, cwd=workshop, env=environment, stderr=subprocess.PIPE, text=True
    ) as serving:
        try:
            assert serving.stderr is not None
            lines = iter(serving.stderr.readline, "")
            found = next(
                match[0] for line in lines if (match := re.search(r"http://[\d.]+:\d+", line))
            )

            ended = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                cwd=workshop,
                env={**environment, "TINKER_BASE_URL": found},
                capture_output=True,
                text=True,
                timeout=ENDS_WITHIN_S,
                check=False,
            )
        finally:
            serving.terminate()
            serving.communicate()

    assert ended.stdout.strip() == "well", ended.stderr


def test_every_name_leads_to_a_whole_model(workshop: Path) -> None:
    for name in NAMES:
        assert (workshop / name / "tokenizer.json").is_file()
        assert (workshop / name / "model.safetensors").is_file()


def test_datasets_are_where_their_names_lead(workshop: Path) -> None:
    """In the form in which `datasets` finds them: files named after splits, or named by a card."""
    for name in ("HuggingFaceH4/no_robots", "Anthropic/hh-rlhf", "openai/gsm8k/main"):
        for split in ("train", "test"):
            rows = (workshop / name / f"{split}.jsonl").read_text().splitlines()
            assert len({json.dumps(json.loads(row), sort_keys=True) for row in rows}) > 20
    card = (workshop / "openai/gsm8k/README.md").read_text()
    for path in re.findall(r"path: (\S+)", card):
        assert (workshop / "openai/gsm8k" / path).is_file()
    question = json.loads((workshop / "openai/gsm8k/main/test.jsonl").read_text().splitlines()[0])
    numbers = [int(number) for number in re.findall(r"\d+", question["question"])]
    assert question["answer"].endswith(f"#### {sum(numbers)}")


def test_two_workshops_are_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_workshop(tmp_path / name)

    for file in (tmp_path / "one").rglob("*"):
        if file.is_file() and file.name != "tinsmith.toml":  # which names its own folder
            twin = tmp_path / "two" / file.relative_to(tmp_path / "one")
            assert twin.read_bytes() == file.read_bytes()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(ValidationError, match="not empty"):
        make_workshop(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
