"""What `recipes.py` makes of runs; the recipes themselves are run by hand."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tests.e2e.recipes import (
    HEAD,
    PAGE,
    RECIPES,
    RUN,
    TABLE,
    Recipe,
    Run,
    compared,
    kept_runs,
    row,
)
from tinsmith.demo.workshop.folder import NAMES

LOSS: dict[str, object] = {"step": 1, "train_mean_nll": 5.5, "time/total": 1.0}


def test_metrics_are_compared_without_timings() -> None:
    one = Run(None, 1.0, [LOSS, {**LOSS, "train_mean_nll": 5.4}])
    later = Run(None, 1.0, [{**LOSS, "time/total": 9.0}, {**LOSS, "train_mean_nll": 5.4}])
    parted = Run(None, 1.0, [LOSS, {**LOSS, "train_mean_nll": 5.3}])
    sampled = Run(None, 1.0, [{**LOSS, "train_mean_nll": 5.0}])
    named = Run(None, 1.0, [{**LOSS, "more": 1.0}])

    assert compared([one, later]) == "identical"
    assert compared([one, parted]) == "identical at step 1"
    assert compared([one, sampled]) == "own samples"
    assert compared([one, named]) == "other figures: more"
    assert compared([one, Run("failed", 1.0, [])]) == ""


def test_runs_are_stored_by_recipe_and_backend(tmp_path: Path) -> None:
    run = Run("Error", 1.0, [LOSS])
    recipe = Recipe("math_rl.train", "", "math_rl, gsm8k")
    place = tmp_path / "math_rl-gsm8k" / "official"
    place.mkdir(parents=True)
    (place / RUN).write_bytes(msgspec.json.encode(run))

    assert kept_runs(tmp_path, recipe) == {"official": run}
    assert kept_runs(tmp_path, Recipe("sl_loop", "")) == {}


def test_a_row_shows_the_outcome_on_each_backend() -> None:
    runs = {"official": Run(None, 1.0, []), "embedded": Run("Error: a | b", 1.0, [])}

    assert row(Recipe("sl_loop", ""), runs) == "| sl_loop | ok |  | Error: a \\| b |  |"
    assert HEAD.splitlines()[0].count("|") == 6


def test_recipes_use_models_that_the_workshop_has() -> None:
    used = re.findall(r"model_name=(\S+)", " ".join(recipe.arguments for recipe in RECIPES))

    assert used
    assert set(used) <= set(NAMES)
    assert len({recipe.shown for recipe in RECIPES}) == len(RECIPES)


def test_the_table_is_placed_in_the_page() -> None:
    assert TABLE.search(PAGE.read_text(encoding="utf-8")) is not None
