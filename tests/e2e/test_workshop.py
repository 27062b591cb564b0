"""`tinsmith workshop`: Tinker programs run offline in the folder it creates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tinsmith.demo.workshop.folder import FAMILIES, LONG_NAMES, NAMES, make_workshop
from tinsmith.demo.workshop.tiny_datasets import DATASETS
from tinsmith.errors import ValidationError

ENDS_WITHIN_S = 240.0

PROGRAM = """
import tinker
from tinker import types
from transformers import AutoTokenizer

for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-20b"):
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


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workshop created by the command."""
    folder = tmp_path_factory.mktemp("made") / "workshop"
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "workshop", str(folder), "-f", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout)["environment"].keys() == {"TINKER_BASE_URL", "TINKER_API_KEY"}
    return folder


def test_a_program_for_the_official_sdk_runs_offline(workshop: Path, tmp_path: Path) -> None:
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


def test_every_name_is_a_complete_model(workshop: Path) -> None:
    for name in NAMES:
        assert (workshop / name / "tokenizer.json").is_file()
        assert (workshop / name / "model.safetensors").is_file()


def test_models_have_an_untied_output_layer(workshop: Path) -> None:
    """Programs that merge an adapter expect it: adapters may contain the output layer."""
    for family in FAMILIES:
        weights = (workshop / "models" / family / "model.safetensors").read_bytes()
        assert b'"lm_head.weight"' in weights


def test_special_tokens_are_single_tokens_and_the_template_uses_them(workshop: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    jinja2 = pytest.importorskip("jinja2")
    chat = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    for name, family in FAMILIES.items():
        home = workshop / "models" / name
        tokenizer = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
        for token in family.tokens:
            assert tokenizer.encode(token, add_special_tokens=False).tokens == [token]
        assert {family.end, family.pad, family.begin or family.end} <= set(family.tokens)

        template = jinja2.Template(family.template)
        text = template.render(messages=chat, add_generation_prompt=True)
        made = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(made.ids, skip_special_tokens=False) == text
        assert len([token for token in made.tokens if token in family.tokens]) >= 5
        assert made.ids[: len(tokenizer.encode("", add_special_tokens=True).ids)] == (
            tokenizer.encode("", add_special_tokens=True).ids
        )


def test_thinking_tags_survive_skip_special_tokens(workshop: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = workshop / "Qwen/Qwen3.5-9B/tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))

    ids = tokenizer.encode("<think>2</think>2<|im_end|>").ids

    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>2</think>2"


def test_model_names_with_a_suffix_are_served_too(workshop: Path) -> None:
    settings = tomllib.loads((workshop / "tinsmith.toml").read_text())
    served = {given.partition("=")[0] for given in settings["models"]}

    assert served >= {*NAMES, *(f"{name}:tiny" for name in NAMES)}
    assert "Qwen/Qwen3.6-35B-A3B:peft:262144" in served
    assert set(LONG_NAMES) <= set(NAMES)


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_are_found_by_name(workshop: Path, name: str) -> None:
    """As `datasets` expects: files named after splits, or listed in a dataset card."""
    dataset = DATASETS[name]
    homes = [workshop / name / which for which in dataset.configurations] or [workshop / name]
    for home in homes:
        for split, count in dataset.splits.items():
            rows = [json.loads(row) for row in (home / f"{split}.jsonl").read_text().splitlines()]
            assert len(rows) == count
            assert len({json.dumps(row, sort_keys=True) for row in rows}) > 20
            assert len({tuple(row) for row in rows}) == 1
    if dataset.configurations:
        paths = re.findall(r"path: (\S+)", (workshop / name / "README.md").read_text())
        assert len(paths) == len(homes) * len(dataset.splits)
        assert all((workshop / name / path).is_file() for path in paths)


def test_answers_are_correct(workshop: Path) -> None:
    rows = (workshop / "openai/gsm8k/main/test.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        assert row["answer"].endswith(f"#### {sum(numbers)}")


def test_two_workshops_are_identical(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_workshop(tmp_path / name)

    for file in (tmp_path / "one").rglob("*"):
        if file.is_file() and file.name != "tinsmith.toml":  # contains the folder's own path
            twin = tmp_path / "two" / file.relative_to(tmp_path / "one")
            assert twin.read_bytes() == file.read_bytes()


def test_a_folder_that_is_not_empty_is_rejected_and_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(ValidationError, match="not empty"):
        make_workshop(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
