"""Tiny synthetic datasets with the columns of well-known ones; every row is an addition problem.

Each is a folder that `datasets.load_dataset` can read: a JSON Lines file per split, or a subfolder
of those per configuration and a dataset card that lists them. The content is deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

SEED = 0
MANY = 1200
"""More than the 1024 rows that programs hold out from datasets without a test split."""
_USUAL = {"train": 200, "test": 40}
_LETTERS = "ABCD"


class Addition(msgspec.Struct, frozen=True):
    """The addition problem of a row."""

    number: int
    """The row number in its file."""
    who: str
    first: int
    second: int

    @property
    def total(self) -> int:
        """The correct answer."""
        return self.first + self.second

    @property
    def question(self) -> str:
        """The problem in words."""
        return (
            f"{self.who} has {self.first} tins and buys {self.second} more. "
            f"How many tins does {self.who} have?"
        )

    @property
    def answer(self) -> str:
        """The correct answer as a sentence."""
        return f"{self.who} has {self.total} tins."

    @property
    def wrong_answer(self) -> str:
        """A verbose answer that is off by one."""
        return f"Let me see. I think that {self.who} has {self.total + 1} tins."


Row = dict[str, Any]


class TinyDataset(msgspec.Struct, frozen=True, kw_only=True):
    """How to write one dataset."""

    row: Callable[[Addition], Row]
    splits: Mapping[str, int] = msgspec.field(default_factory=lambda: _USUAL)
    """The number of rows of each split."""
    configurations: tuple[str, ...] = ()


def write_dataset(folder: Path, dataset: TinyDataset) -> None:
    """Create the folder of a dataset and write its files.

    Raises:
        OSError: A file could not be written.
    """
    seed = SEED
    for home in [folder / name for name in dataset.configurations] or [folder]:
        home.mkdir(parents=True)
        for split, count in dataset.splits.items():
            lines = [json.dumps(dataset.row(one)) + "\n" for one in _additions(count, seed)]
            (home / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            seed += 1
    if dataset.configurations:
        (folder / "README.md").write_text(_card(dataset), encoding="utf-8")


def _additions(count: int, seed: int) -> Iterator[Addition]:
    rng = random.Random(seed)  # noqa: S311 - examples, and no secret
    for number in range(count):
        first, second = rng.randint(1, 50), rng.randint(1, 50)
        yield Addition(number, rng.choice(("Ada", "Ben", "Cleo", "Dan")), first, second)


def _card(dataset: TinyDataset) -> str:
    lines = ["---", "configs:"]
    for name in dataset.configurations:
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in dataset.splits:
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    return "\n".join(
        [
            *lines,
            "---",
            "",
            "Synthetic data with the columns of its namesake.",
            "",
        ]
    )


# Questions and answers


def _gsm8k(one: Addition) -> Row:
    worked = f"{one.first} + {one.second} = <<{one.first}+{one.second}={one.total}>>{one.total}"
    return {"question": one.question, "answer": f"{worked}\n#### {one.total}"}


def _math(one: Addition) -> Row:
    return {
        "problem": one.question,
        "solution": f"${one.first} + {one.second} = \\boxed{{{one.total}}}$",
        "answer": str(one.total),
        "level": "Level 1",
        "type": "Prealgebra",
        "subject": "Prealgebra",
        "unique_id": f"synthetic/{one.number}",
    }


def _deepmath(one: Addition) -> Row:
    return {
        "question": one.question,
        "final_answer": str(one.total),
        "difficulty": 1.0,
        "topic": "Arithmetic",
        "r1_solution_1": one.answer,
    }


def _polaris(one: Addition) -> Row:
    return {"problem": one.question, "answer": str(one.total), "difficulty": "1/8"}


def _choices(one: Addition) -> Row:
    right = one.number % len(_LETTERS)
    texts = [str(one.total + place - right) for place in range(len(_LETTERS))]
    return {
        "question": one.question,
        "choices": {"text": texts, "label": list(_LETTERS)},
        "answerKey": _LETTERS[right],
        "answer": "",
        "type": "mcq-4-choices",
        "domain": ("Biology", "Chemistry", "Material", "Physics")[one.number // 4 % 4],
        "details": {"level": "L3", "task": "sums", "subtask": "tins"},
    }


def _instruction(one: Addition) -> Row:
    return {"instruction": one.question, "output": one.answer}


# Conversations


def _messages(one: Addition, answer: str) -> list[Row]:
    return [
        {"role": "user", "content": one.question},
        {"role": "assistant", "content": answer},
    ]


def _no_robots(one: Addition) -> Row:
    return {
        "prompt": one.question,
        "prompt_id": str(one.number),
        "messages": _messages(one, one.answer),
        "category": "Closed QA",
    }


def _tulu(one: Addition) -> Row:
    return {"id": str(one.number), "messages": _messages(one, one.answer), "source": "synthetic"}


def _thoughts(one: Addition) -> Row:
    thought = f"<think>\n{one.first} + {one.second} = {one.total}\n</think>\n\n"
    return {
        "conversations": [
            {"from": "human", "value": one.question},
            {"from": "gpt", "value": thought + one.answer},
        ],
        "domain": "math",
        "difficulty": 1,
        "source": "synthetic",
    }


def _prose(one: Addition) -> Row:
    return {"text": f" {one.question} {one.answer} \n"}


# Preferences


def _hh_rlhf(one: Addition) -> Row:
    asked = f"\n\nHuman: {one.question}\n\nAssistant: "
    return {"chosen": asked + one.answer, "rejected": asked + one.wrong_answer}


def _tulu_preferences(one: Addition) -> Row:
    return {
        "id": str(one.number),
        "prompt": one.question,
        "chosen": _messages(one, one.answer),
        "rejected": _messages(one, one.wrong_answer),
    }


def _ultrafeedback(one: Addition) -> Row:
    return {
        "instruction": one.question,
        "chosen_response": one.answer,
        "rejected_response": one.wrong_answer,
    }


def _helpsteer3(one: Addition) -> Row:
    first_is_better = one.number % 2 == 0
    answers = (one.answer, one.wrong_answer) if first_is_better else (one.wrong_answer, one.answer)
    return {
        "domain": "general",
        "language": "english",
        "context": [{"role": "user", "content": one.question}],
        "response1": answers[0],
        "response2": answers[1],
        "overall_preference": -2 if first_is_better else 2,
    }


def _helpsteer2(one: Addition) -> Row:
    """Consecutive rows are two answers to one question."""
    is_good = one.number % 2 == 0
    return {
        "prompt": f"What is twice {one.number // 2}?",
        "response": f"It is {one.number // 2 * 2}." if is_good else "I do not know.",
        "helpfulness": 4 if is_good else 1,
    }


def _arena(one: Addition) -> Row:
    def conversation(answer: str) -> list[Row]:
        return [
            {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
            for message in _messages(one, answer)
        ]

    is_first = one.number % 2 == 0
    answers = (one.answer, one.wrong_answer) if is_first else (one.wrong_answer, one.answer)
    return {
        "winner": "model_a" if is_first else "model_b",
        "conversation_a": conversation(answers[0]),
        "conversation_b": conversation(answers[1]),
        "language": "en",
    }


def _feedback(one: Addition) -> Row:
    scores = {f"orig_score{score}_description": f"It is worth {score}." for score in range(1, 6)}
    return {
        "orig_instruction": one.question,
        "orig_criteria": "Is the number right?",
        "orig_reference_answer": one.answer,
        **scores,
    }


DATASETS: dict[str, TinyDataset] = {
    "openai/gsm8k": TinyDataset(row=_gsm8k, configurations=("main",)),
    "HuggingFaceH4/MATH-500": TinyDataset(row=_math, splits={"test": 40}),
    "EleutherAI/hendrycks_math": TinyDataset(row=_math, configurations=("algebra", "prealgebra")),
    "zwhe99/DeepMath-103K": TinyDataset(row=_deepmath, splits={"train": 200}),
    "POLARIS-Project/Polaris-Dataset-53K": TinyDataset(row=_polaris, splits={"train": 200}),
    "hicai-zju/SciKnowEval": TinyDataset(row=_choices, splits={"test": 200}),
    "tangqiaoyu/ToolAlpaca": TinyDataset(row=_instruction, splits={"train": 200}),
    "HuggingFaceH4/no_robots": TinyDataset(row=_no_robots),
    "allenai/tulu-3-sft-mixture": TinyDataset(row=_tulu, splits={"train": MANY}),
    "open-thoughts/OpenThoughts3-1.2M": TinyDataset(row=_thoughts, splits={"train": 200}),
    "Salesforce/wikitext": TinyDataset(row=_prose, configurations=("wikitext-103-raw-v1",)),
    "Anthropic/hh-rlhf": TinyDataset(row=_hh_rlhf),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": TinyDataset(
        row=_tulu_preferences, splits={"train": MANY}
    ),
    "argilla/ultrafeedback-binarized-preferences": TinyDataset(
        row=_ultrafeedback, splits={"train": MANY}
    ),
    "nvidia/HelpSteer3": TinyDataset(
        row=_helpsteer3,
        splits={"train": 200, "validation": 40},
        configurations=("preference",),
    ),
    "nvidia/HelpSteer2": TinyDataset(row=_helpsteer2, splits={"train": 200, "validation": 40}),
    "lmarena-ai/arena-human-preference-140k": TinyDataset(row=_arena, splits={"train": MANY}),
    "prometheus-eval/Feedback-Collection": TinyDataset(row=_feedback, splits={"train": 200}),
}
"""The datasets by the name that programs load."""
