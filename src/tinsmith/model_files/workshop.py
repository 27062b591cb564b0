"""A folder in which programs written for Tinker run with no hub and no network.

    Qwen/Qwen3-8B, …       a small stand-in under each name that programs use, with its tokenizer
    openai/gsm8k, …        small made-up datasets where `datasets.load_dataset` finds a folder
    tinsmith.toml          the settings of a service that serves the stand-ins
    README.md              what to do

Libraries take a name for a folder if there is one of that name below the current one: so programs
are run in this folder. The names are links; each family's model is there once, in `models/`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.model_files.stand_in import LLAMA, QWEN, make_stand_in

FAMILIES = {"qwen-tiny": QWEN, "llama-tiny": LLAMA}
NAMES = {
    "Qwen/Qwen3-8B": "qwen-tiny",
    "Qwen/Qwen3-8B-Base": "qwen-tiny",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen-tiny",
    "Qwen/Qwen3-30B-A3B": "qwen-tiny",
    "Qwen/Qwen3-30B-A3B-Base": "qwen-tiny",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen-tiny",
    "Qwen/Qwen3-32B": "qwen-tiny",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen-tiny",
    "meta-llama/Llama-3.1-8B": "llama-tiny",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-tiny",
    "meta-llama/Llama-3.2-1B": "llama-tiny",
    "meta-llama/Llama-3.2-3B": "llama-tiny",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-tiny",
}
"""Names that programs use, and the stand-in behind each."""
TRAIN_ROWS, TEST_ROWS = 200, 40
SEED = 0


def make_workshop(folder: Path) -> None:
    """Write the workshop into a folder, which is made; it must hold nothing.

    Raises:
        ValidationError: There is something in the folder.
        OSError: A file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValidationError(
            f"{folder} is not empty", remedy="name a folder that is, or a new one"
        )
    for family, chat in FAMILIES.items():
        home = folder / "models" / family
        home.mkdir(parents=True)
        make_stand_in(home, chat)
    for name, family in NAMES.items():
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path("..") / "models" / family, target_is_directory=True)
    for name, write in _DATASETS.items():
        home = folder / name
        home.mkdir(parents=True)
        write(home)
    (folder / "tinsmith.toml").write_text(_settings(folder.absolute()), encoding="utf-8")
    (folder / "README.md").write_text(_PAGE, encoding="utf-8")


def served_names(folder: Path) -> list[str]:
    """The models of the workshop's service, as settings give them; `:tiny` says what they are."""
    given = []
    for name, family in NAMES.items():
        path = folder / "models" / family
        given += [f"{name}:tiny={path}", f"{name}={path}"]
    return given


def _settings(folder: Path) -> str:
    models = "".join(f"    {json.dumps(text)},\n" for text in served_names(folder))
    return f"""\
# The service of this workshop: `tinsmith serve --config tinsmith.toml`
engine = "embedded"
dtype = "float32"
threads = 1
data = {json.dumps(str(folder / "data"))}
models = [
{models}]
"""


# Datasets


def _sums(count: int, seed: int) -> Iterator[tuple[str, int, int, int]]:
    chance = random.Random(seed)  # noqa: S311 - examples, and no secret
    for _ in range(count):
        first, second = chance.randint(1, 50), chance.randint(1, 50)
        who = chance.choice(("Ada", "Ben", "Cleo", "Dan"))
        yield who, first, second, first + second


def _splits(home: Path, row: Callable[[str, int, int, int], dict[str, Any]]) -> None:
    for seed, (split, count) in enumerate({"train": TRAIN_ROWS, "test": TEST_ROWS}.items()):
        lines = [json.dumps(row(*numbers)) for numbers in _sums(count, SEED + seed)]
        (home / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _problem(who: str, first: int, second: int) -> str:
    return f"{who} has {first} tins and buys {second} more. How many tins does {who} have?"


def _gsm8k(home: Path) -> None:
    """Questions with worked answers that end in `#### number`, in a configuration `main`."""
    (home / "main").mkdir()
    _splits(
        home / "main",
        lambda who, first, second, total: {
            "question": _problem(who, first, second),
            "answer": f"{first} + {second} = <<{first}+{second}={total}>>{total}\n#### {total}",
        },
    )
    (home / "README.md").write_text(_configured("main"), encoding="utf-8")


def _no_robots(home: Path) -> None:
    """Conversations, in `messages`."""
    _splits(
        home,
        lambda who, first, second, total: {
            "prompt": _problem(who, first, second),
            "messages": [
                {"role": "user", "content": _problem(who, first, second)},
                {"role": "assistant", "content": f"{who} has {total} tins."},
            ],
            "category": "Closed QA",
        },
    )


def _preferences(home: Path) -> None:
    """Two answers to each question, of which one is better."""

    def row(who: str, first: int, second: int, total: int) -> dict[str, Any]:
        asked = f"\n\nHuman: {_problem(who, first, second)}\n\nAssistant: "
        return {"chosen": f"{asked}{total}", "rejected": f"{asked}{total + 1}"}

    _splits(home, row)


def _configured(name: str) -> str:
    return f"""\
---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: {name}/train.jsonl
  - split: test
    path: {name}/test.jsonl
---

Made up by tinsmith, in the form of the dataset of this name.
"""


_DATASETS = {
    "openai/gsm8k": _gsm8k,
    "HuggingFaceH4/no_robots": _no_robots,
    "Anthropic/hh-rlhf": _preferences,
}

_PAGE = """\
# A workshop without a hub

Everything that programs written for Tinker ask the hub for is in this folder: small random models
under the names of large ones, their tokenizers, and made-up datasets. What is learned here means
nothing; that a program runs does.

Run programs in this folder, where libraries find these names as folders. Start the service:

    tinsmith serve --config tinsmith.toml

and set two variables for the programs:

    export TINKER_BASE_URL=http://127.0.0.1:8000
    export TINKER_API_KEY=tml-workshop

Programs of tinsmith need no service beside them: `TINSMITH_SERVE_CONFIG=tinsmith.toml` instead of
the two runs it in the program itself.

The models are named in `tinsmith.toml`; names that end in `:tiny` are the same models, and say that
they are stand-ins.
"""
