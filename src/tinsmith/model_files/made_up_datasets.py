"""Small datasets in the form of well-known ones: sums, told as questions, answers and choices.

Each is a folder as `datasets.load_dataset` reads one: a file of lines of JSON for each split, or a
folder of these for each configuration and a card that names them. The columns are those of the
dataset whose name it bears. The same is written every time.
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
"""More than the 1024 rows that programs keep back for tests of datasets without a test split."""
_USUAL = {"train": 200, "test": 40}
_LETTERS = "ABCD"


class Sum(msgspec.Struct, frozen=True):
    """What a row tells of."""

    number: int
    """Of the row in its file."""
    who: str
    first: int
    second: int

    @property
    def total(self) -> int:
        """The right answer."""
        return self.first + self.second

    @property
    def question(self) -> str:
        """The sum as a story."""
        return (
            f"{self.who} has {self.first} tins and buys {self.second} more. "
            f"How many tins does {self.who} have?"
        )

    @property
    def answer(self) -> str:
        """The right answer as a sentence."""
        return f"{self.who} has {self.total} tins."

    @property
    def wrong_answer(self) -> str:
        """One that is off by one, and says more than it needs to."""
        return f"Let me see. I think that {self.who} has {self.total + 1} tins."


Row = dict[str, Any]


class MadeUp(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset."""

    row: Callable[[Sum], Row]
    splits: Mapping[str, int] = msgspec.field(default_factory=lambda: _USUAL)
    """How many rows each has."""
    configurations: tuple[str, ...] = ()


def write_dataset(folder: Path, made_up: MadeUp) -> None:
    """Write the files of a dataset into its folder, which is made.

    Raises:
        OSError: A file could not be written.
    """
    seed = SEED
    for home in [folder / name for name in made_up.configurations] or [folder]:
        home.mkdir(parents=True)
        for split, count in made_up.splits.items():
            lines = [json.dumps(made_up.row(one)) + "\n" for one in _sums(count, seed)]
            (home / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            seed += 1
    if made_up.configurations:
        (folder / "README.md").write_text(_card(made_up), encoding="utf-8")


def _sums(count: int, seed: int) -> Iterator[Sum]:
    chance = random.Random(seed)  # noqa: S311 - examples, and no secret
    for number in range(count):
        first, second = chance.randint(1, 50), chance.randint(1, 50)
        yield Sum(number, chance.choice(("Ada", "Ben", "Cleo", "Dan")), first, second)


def _card(made_up: MadeUp) -> str:
    lines = ["---", "configs:"]
    for name in made_up.configurations:
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in made_up.splits:
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    return "\n".join([*lines, "---", "", "Made up by tinsmith, in the form of its namesake.", ""])


# Questions with an answer


def _gsm8k(one: Sum) -> Row:
    worked = f"{one.first} + {one.second} = <<{one.first}+{one.second}={one.total}>>{one.total}"
    return {"question": one.question, "answer": f"{worked}\n#### {one.total}"}


def _math(one: Sum) -> Row:
    return {
        "problem": one.question,
        "solution": f"${one.first} + {one.second} = \\boxed{{{one.total}}}$",
        "answer": str(one.total),
        "level": "Level 1",
        "type": "Prealgebra",
        "subject": "Prealgebra",
        "unique_id": f"made-up/{one.number}",
    }


def _deepmath(one: Sum) -> Row:
    return {
        "question": one.question,
        "final_answer": str(one.total),
        "difficulty": 1.0,
        "topic": "Arithmetic",
        "r1_solution_1": one.answer,
    }


def _polaris(one: Sum) -> Row:
    return {"problem": one.question, "answer": str(one.total), "difficulty": "1/8"}


def _choices(one: Sum) -> Row:
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


def _instruction(one: Sum) -> Row:
    return {"instruction": one.question, "output": one.answer}


# Conversations


def _turns(one: Sum, answer: str) -> list[Row]:
    return [
        {"role": "user", "content": one.question},
        {"role": "assistant", "content": answer},
    ]


def _no_robots(one: Sum) -> Row:
    return {
        "prompt": one.question,
        "prompt_id": str(one.number),
        "messages": _turns(one, one.answer),
        "category": "Closed QA",
    }


def _tulu(one: Sum) -> Row:
    return {"id": str(one.number), "messages": _turns(one, one.answer), "source": "made up"}


def _thoughts(one: Sum) -> Row:
    thought = f"<think>\n{one.first} + {one.second} = {one.total}\n</think>\n\n"
    return {
        "conversations": [
            {"from": "human", "value": one.question},
            {"from": "gpt", "value": thought + one.answer},
        ],
        "domain": "math",
        "difficulty": 1,
        "source": "made up",
    }


def _prose(one: Sum) -> Row:
    return {"text": f" {one.question} {one.answer} \n"}


# Two answers, of which one is better


def _hh_rlhf(one: Sum) -> Row:
    asked = f"\n\nHuman: {one.question}\n\nAssistant: "
    return {"chosen": asked + one.answer, "rejected": asked + one.wrong_answer}


def _tulu_preferences(one: Sum) -> Row:
    return {
        "id": str(one.number),
        "prompt": one.question,
        "chosen": _turns(one, one.answer),
        "rejected": _turns(one, one.wrong_answer),
    }


def _ultrafeedback(one: Sum) -> Row:
    return {
        "instruction": one.question,
        "chosen_response": one.answer,
        "rejected_response": one.wrong_answer,
    }


def _helpsteer3(one: Sum) -> Row:
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


def _helpsteer2(one: Sum) -> Row:
    """Two rows that follow each other are answers to one question."""
    is_good = one.number % 2 == 0
    return {
        "prompt": f"What is twice {one.number // 2}?",
        "response": f"It is {one.number // 2 * 2}." if is_good else "I do not know.",
        "helpfulness": 4 if is_good else 1,
    }


def _arena(one: Sum) -> Row:
    def conversation(answer: str) -> list[Row]:
        return [
            {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
            for turn in _turns(one, answer)
        ]

    is_first = one.number % 2 == 0
    answers = (one.answer, one.wrong_answer) if is_first else (one.wrong_answer, one.answer)
    return {
        "winner": "model_a" if is_first else "model_b",
        "conversation_a": conversation(answers[0]),
        "conversation_b": conversation(answers[1]),
        "language": "en",
    }


def _feedback(one: Sum) -> Row:
    scores = {f"orig_score{score}_description": f"It is worth {score}." for score in range(1, 6)}
    return {
        "orig_instruction": one.question,
        "orig_criteria": "Is the number right?",
        "orig_reference_answer": one.answer,
        **scores,
    }


DATASETS: dict[str, MadeUp] = {
    "openai/gsm8k": MadeUp(row=_gsm8k, configurations=("main",)),
    "HuggingFaceH4/MATH-500": MadeUp(row=_math, splits={"test": 40}),
    "EleutherAI/hendrycks_math": MadeUp(row=_math, configurations=("algebra", "prealgebra")),
    "zwhe99/DeepMath-103K": MadeUp(row=_deepmath, splits={"train": 200}),
    "POLARIS-Project/Polaris-Dataset-53K": MadeUp(row=_polaris, splits={"train": 200}),
    "hicai-zju/SciKnowEval": MadeUp(row=_choices, splits={"test": 200}),
    "tangqiaoyu/ToolAlpaca": MadeUp(row=_instruction, splits={"train": 200}),
    "HuggingFaceH4/no_robots": MadeUp(row=_no_robots),
    "allenai/tulu-3-sft-mixture": MadeUp(row=_tulu, splits={"train": MANY}),
    "open-thoughts/OpenThoughts3-1.2M": MadeUp(row=_thoughts, splits={"train": 200}),
    "Salesforce/wikitext": MadeUp(row=_prose, configurations=("wikitext-103-raw-v1",)),
    "Anthropic/hh-rlhf": MadeUp(row=_hh_rlhf),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": MadeUp(
        row=_tulu_preferences, splits={"train": MANY}
    ),
    "argilla/ultrafeedback-binarized-preferences": MadeUp(
        row=_ultrafeedback, splits={"train": MANY}
    ),
    "nvidia/HelpSteer3": MadeUp(
        row=_helpsteer3,
        splits={"train": 200, "validation": 40},
        configurations=("preference",),
    ),
    "nvidia/HelpSteer2": MadeUp(row=_helpsteer2, splits={"train": 200, "validation": 40}),
    "lmarena-ai/arena-human-preference-140k": MadeUp(row=_arena, splits={"train": MANY}),
    "prometheus-eval/Feedback-Collection": MadeUp(row=_feedback, splits={"train": 200}),
}
"""What is written, under the names that programs load."""
