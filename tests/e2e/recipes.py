"""Runs recipes of `tinker-cookbook`, unchanged, in a workshop: with three clients, and no hub.

    python -m tests.e2e.recipes                     makes a venv with the cookbook first
    python -m tests.e2e.recipes --python PATH       of a venv that has it, and tinsmith's packages
    python -m tests.e2e.recipes --only sl_loop rl_loop --way official
    python -m tests.e2e.recipes --write             puts the table into docs/workshop.md
    python -m tests.e2e.recipes --folder DIR        keeps all, and repeats nothing that ended there

Each recipe takes a few small steps: with the official client at a service, with ours in its place
(`python -m tinsmith.as_tinker -m …`) at the same service, and with ours and no service beside it.
What the recipe logs is then compared between the three. Not a test of the suite: it needs packages
that the project does not, and half an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.e2e.service.served import serving
from tinsmith.demo.workshop.folder import make_workshop, served_names

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "workshop.md"
TABLE = re.compile(r"(<!-- recipes -->\n).*?(<!-- /recipes -->)", re.DOTALL)
PACKAGES = ("tinker-cookbook[math-rl]==0.5.8", "textarena")
WAYS = ("official", "as_tinker", "embedded")
SENTENCES = ("Wie geht es dir heute?", "How are you today?", "¿Cómo estás hoy?")
NOT_COMPARED = re.compile(r"time|_s$|^ts$|path|date|tokens_per|timing|git|lag|norm")
"""Names of logged figures that differ between two runs of the same: times, places, and how large a
gradient is in an adapter that is drawn anew."""
SAME = 1e-9
"""How far two figures may be apart, relatively."""

RUN = "run.json"
"""How a run ended, beside what it wrote; runs that have it are not repeated."""

Logged = Sequence[Mapping[str, object]]


class Recipe(msgspec.Struct, frozen=True):
    """One program of the cookbook, with what makes it short."""

    module: str
    """Below `tinker_cookbook.recipes`."""
    arguments: str
    name: str = ""
    """If the module alone does not say it."""

    @property
    def shown(self) -> str:
        """What the table calls it."""
        return self.name or self.module


GSM8K = "batch_size=4 group_size=2 max_tokens=16 max_steps=2"
MATH = "group_size=2 groups_per_batch=4 max_steps=2 eval_every=0"
TEACH = "group_size=2 groups_per_batch=2 max_tokens=16 max_steps=2 lora_rank=8 eval_every=0"
RECIPES = (
    Recipe("sl_loop", "batch_size=8 max_steps=3"),
    Recipe("sl_basic", "max_steps=1"),
    Recipe("rl_loop", GSM8K),
    Recipe("rl_basic", "max_tokens=2 max_steps=1"),
    Recipe("math_rl.train", f"{MATH}", "math_rl, arithmetic"),
    Recipe("math_rl.train", f"{MATH} env=gsm8k max_tokens=16", "math_rl, gsm8k"),
    Recipe("math_rl.train", f"{MATH} env=math max_tokens=16", "math_rl, math"),
    Recipe(
        "math_rl.train",
        f"{MATH} env=deepmath max_tokens=16 loss_fn=ppo num_substeps=2",
        "math_rl, deepmath by ppo",
    ),
    Recipe(
        "math_rl.train",
        f"{MATH} model_name=openai/gpt-oss-20b compute_post_kl=True",
        "math_rl, gpt-oss with the KL after a step",
    ),
    Recipe(
        "math_rl.train",
        f"{MATH} model_name=deepseek-ai/DeepSeek-V3.1 max_steps_off_policy=1",
        "math_rl, DeepSeek off policy",
    ),
    Recipe("chat_sl.train", "batch_size=8 max_steps=3 eval_every=2", "chat_sl, no_robots"),
    Recipe(
        "chat_sl.train",
        "batch_size=8 max_steps=3 eval_every=0 dataset=tulu3 model_name=moonshotai/Kimi-K2.6",
        "chat_sl, tulu3 with Kimi",
    ),
    Recipe(
        "chat_sl.train",
        "batch_size=8 max_steps=3 model_name=meta-llama/Llama-3.1-8B-Instruct save_every=1",
        "chat_sl, no_robots with Llama",
    ),
    Recipe("preference.dpo.train", "batch_size=8 max_steps=2", "preference, dpo of hhh"),
    Recipe(
        "preference.dpo.train",
        "batch_size=8 max_steps=2 dataset=helpsteer3 model_name=zai-org/GLM-5.3",
        "preference, dpo of helpsteer3 with GLM",
    ),
    Recipe("preference.shorter.train", f"{GSM8K} eval_every=0", "preference, shorter"),
    Recipe(
        "preference.rlhf.rlhf_pipeline",
        "batch_size=8 max_steps=1 lora_rank=8 rl_max_tokens=8 rl_group_size=2 eval_every=0",
        "preference, rlhf in three stages",
    ),
    Recipe("distillation.on_policy_distillation", TEACH, "distillation, on policy"),
    Recipe(
        "distillation.on_policy_multi_teacher",
        "group_size=2 deepmath_groups_per_batch=2 tulu3_groups_per_batch=2 max_tokens=16 "
        "max_steps=2 lora_rank=8 eval_every=0",
        "distillation, several teachers",
    ),
    Recipe(
        "distillation.off_policy_reasoning",
        "batch_size=8 max_steps=2 buffer_size=64 max_prompts=64 lora_rank=8",
        "distillation, off policy",
    ),
    Recipe("prompt_distillation.create_data", "output_file={out}/data.jsonl"),
    Recipe(
        "prompt_distillation.train",
        "file_path={conversations} batch_size=2 max_steps=2 num_epochs=1",
    ),
    Recipe(
        "sdft.train",
        "groups_per_batch=2 max_tokens=16 topk=5 max_steps=2 lora_rank=8 eval_every=0",
        "sdft, top-k targets",
    ),
    Recipe(
        "rubric.train", "groups_per_batch=2 train_group_size=2 max_tokens=8 max_steps=2 "
        "eval_every=0"
    ),
    Recipe(
        "multiplayer_rl.guess_number.train", f"{GSM8K} eval_every=0", "multiplayer_rl, a number"
    ),
    Recipe(
        "multiplayer_rl.twenty_questions.train",
        f"{GSM8K} num_epochs=1 eval_every=0",
        "multiplayer_rl, twenty questions",
    ),
    Recipe(
        "multiplayer_rl.text_arena.train",
        "batch_size=2 num_train_datapoints=4 num_test_datapoints=2 max_tokens=8 max_steps=2 "
        "eval_every=0",
        "multiplayer_rl, tic-tac-toe",
    ),
    Recipe(
        "rl_numerics_check.train",
        "group_size=2 groups_per_batch=2 max_tokens=16 max_steps=1 task.num_pages_min=2 "
        "task.num_pages_max=3 task.page_chars=200",
        "rl_numerics_check, a long context's name",
    ),
    Recipe(
        "true_thinking_score.analyze",
        "n_problems=2 max_tokens=64 dataset=gsm8k",
        "true_thinking_score",
    ),
    Recipe("decisions.demo", "model_name=Qwen/Qwen3-8B"),
)  # fmt: skip


class Run(msgspec.Struct, frozen=True):
    """How a recipe ended in one way."""

    failure: str | None
    """The last line of what it said, if it failed."""
    took_s: float
    logged: Logged


class Place(msgspec.Struct, frozen=True):
    """Where recipes are run."""

    python: str
    workshop: Path
    runs: Path
    base_url: str
    processes: dict[str, Process] = msgspec.field(default_factory=dict)
    """By the way of running; each is started when it is needed."""

    def run(self, recipe: Recipe, way: str) -> Run:
        """Run it to its end, unless it was run before in this place."""
        out = _place_of(self.runs, recipe, way)
        if (out / RUN).exists():
            return _kept(out)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        run = self._run(recipe, way, out)
        (out / RUN).write_bytes(msgspec.json.encode(run))
        return run

    def _run(self, recipe: Recipe, way: str, out: Path) -> Run:
        example = self.workshop / "tinker_cookbook" / "example_data"
        arguments = recipe.arguments.format(
            out=out, conversations=example / "conversations.jsonl"
        ).split()
        asked = {
            "module": f"tinker_cookbook.recipes.{recipe.module}",
            "arguments": arguments,
            "environment": {
                "TINKER_COOKBOOK_RUNS_DIR": str(out),
                "TINSMITH_SERVE_DATA": f"{out}/d",
            },
            "said": str(out / "said.log"),
        }
        started = time.monotonic()
        status = self._process(way).run(asked)
        failure = None
        if status != 0:
            lines = (out / "said.log").read_text(errors="replace").split("\n")
            failure = next((line for line in reversed(lines) if line.strip()), f"status {status}")
        return Run(failure, time.monotonic() - started, list(_logged(out)))

    def _process(self, way: str) -> Process:
        if way not in self.processes:
            self.processes[way] = Process(self.python, way, self.workshop, self._environment(way))
        return self.processes[way]

    def _environment(self, way: str) -> dict[str, str]:
        hidden = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINSMITH_SERVE_CONFIG")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        if way == "embedded":
            asked = {"TINSMITH_SERVE_CONFIG": "tinsmith.toml"}
        else:
            asked = {"TINKER_BASE_URL": self.base_url, "TINKER_API_KEY": "tml-workshop"}
        return {
            **kept,
            **asked,
            "PYTHONPATH": str(PROJECT / "src"),
            "HOME": str(self.workshop),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TINKER_TELEMETRY": "0",
        }


class Process:
    """`recipe_process.py`, with one client."""

    def __init__(self, python: str, way: str, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("recipe_process.py")), way],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, asked: Mapping[str, object]) -> int:
        """Run one program; returns its status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the process of the recipes has ended; what it said is above")
        return int(told)

    def end(self) -> None:
        """Let nothing of it stay behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def kept_runs(runs: Path, recipe: Recipe) -> dict[str, Run]:
    """Those of a recipe that are kept in a folder."""
    places = {way: _place_of(runs, recipe, way) for way in WAYS}
    return {way: _kept(out) for way, out in places.items() if (out / RUN).exists()}


def _place_of(runs: Path, recipe: Recipe, way: str) -> Path:
    return runs / re.sub(r"\W+", "-", recipe.shown) / way


def _kept(out: Path) -> Run:
    return msgspec.json.decode((out / RUN).read_bytes(), type=Run)


def _logged(out: Path) -> Iterator[dict[str, object]]:
    for file in sorted(out.rglob("metrics.jsonl")):
        for line in file.read_text().splitlines():
            yield json.loads(line)


def compared(runs: Sequence[Run]) -> str:
    """What the logs of runs that ended well have in common."""
    logs = [run.logged for run in runs if run.failure is None]
    if len(logs) < 2 or not logs[0]:
        return ""
    names = [_names(log) for log in logs]
    if any(one != names[0] for one in names):
        odd = sorted(name for name in names[0].union(*names) if not all(name in s for s in names))
        return f"other figures: {', '.join(odd[:3])}"
    if all(_same(logs[0], log) for log in logs):
        return "identical"
    if all(_same(logs[0][:1], log[:1]) for log in logs):
        return "identical at step 1"
    return "own samples"


def _names(log: Logged) -> set[str]:
    return {name for row in log for name in row if not NOT_COMPARED.search(name)}


def _same(one: Logged, other: Logged) -> bool:
    return len(one) == len(other) and all(
        _equal(row[name], twin.get(name))
        for row, twin in zip(one, other, strict=True)
        for name in row
        if not NOT_COMPARED.search(name)
    )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME) or (math.isnan(one) and math.isnan(other))
    return one == other


def row(recipe: Recipe, runs: dict[str, Run]) -> str:
    """A line of the table."""
    ends = [
        "" if way not in runs else "ok" if (bad := runs[way].failure) is None else bad[:80]
        for way in WAYS
    ]
    cells = [recipe.shown, *ends, compared(list(runs.values()))]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


HEAD = "| recipe | `tinker` | `as_tinker` | embedded | metrics |\n|---|---|---|---|---|"


def make_python(folder: Path) -> str:
    """A venv with the cookbook and what tinsmith's service needs."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    packages = [f"{PROJECT}[server]", *PACKAGES]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


def prepare(python: str, workshop: Path) -> None:
    """Write the workshop, and what recipes expect in a clone of the cookbook."""
    if workshop.exists():
        return
    make_workshop(workshop)
    example = workshop / "tinker_cookbook" / "example_data"
    example.mkdir(parents=True)
    (example / "multilingual.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    lines = (workshop / "HuggingFaceH4" / "no_robots" / "train.jsonl").read_text().splitlines()
    (example / "conversations.jsonl").write_text("\n".join(lines[:20]), encoding="utf-8")
    rubrics = "tinker_cookbook.recipes.rubric.generate_data"
    subprocess.run([python, "-m", rubrics], cwd=workshop, check=True, capture_output=True)


def main() -> None:
    """Run as the arguments say; the status is 1 if a recipe failed."""
    parser = argparse.ArgumentParser(description="recipes of tinker-cookbook in a workshop")
    parser.add_argument("--python", help="of a venv with tinker-cookbook and tinsmith's packages")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of recipes")
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument(
        "--folder", type=Path, help="where all is kept, and run once; else it is removed"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/workshop.md")
    parser.add_argument("--kept", action="store_true", help="run nothing; show what the folder has")
    given = parser.parse_args()
    if given.kept and given.folder is None:
        parser.error("--kept needs a --folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [
            recipe
            for recipe in RECIPES
            if not given.only or any(part in recipe.shown for part in given.only)
        ]
        if given.kept:
            rows, is_well = _show_kept(folder / "runs", chosen)
        else:
            python = given.python or make_python(folder)
            rows, is_well = _run_all(folder, python, chosen, given.way)
    if given.write:
        table = "\n".join([HEAD, *rows]) + "\n"
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda found: found[1] + table + found[2], page))
    sys.exit(not is_well)


def _show_kept(runs: Path, chosen: Sequence[Recipe]) -> tuple[list[str], bool]:
    kept = {recipe: kept_runs(runs, recipe) for recipe in chosen}
    rows = [row(recipe, found) for recipe, found in kept.items() if found]
    print("\n".join([HEAD, *rows]))
    return rows, all(run.failure is None for found in kept.values() for run in found.values())


def _run_all(
    folder: Path, python: str, chosen: Sequence[Recipe], ways: Sequence[str]
) -> tuple[list[str], bool]:
    workshop = folder / "workshop"
    prepare(python, workshop)
    first, *others = served_names(workshop.absolute())
    more = [text for name in others for text in ("--model", name)]
    rows, is_well = [], True
    print(HEAD)
    with serving(
        folder / f"service-{os.getpid()}", *more, "--threads", "1", engine="embedded", model=first
    ) as served:
        place = Place(python, workshop.absolute(), (folder / "runs").absolute(), served.base_url)
        try:
            for recipe in chosen:
                runs = {way: place.run(recipe, way) for way in ways}
                is_well = is_well and all(run.failure is None for run in runs.values())
                rows.append(row(recipe, runs))
                print(rows[-1], *(f"{run.took_s:.0f} s" for run in runs.values()), flush=True)
        finally:
            for process in place.processes.values():
                process.end()
    return rows, is_well


if __name__ == "__main__":
    main()
