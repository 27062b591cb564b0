"""The page on the architecture names the modules that there are, and no others."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CLIENT = sorted((ROOT / "src" / "tinsmith" / "client").glob("[!_]*.py"))


@pytest.mark.parametrize("module", CLIENT, ids=lambda module: module.stem)
def test_every_module_of_the_client_is_listed(module: pathlib.Path) -> None:
    assert f"| `{module.name}` | " in PAGE


def test_every_module_that_the_page_names_exists() -> None:
    there = {path.name for path in (ROOT / "src").rglob("*.py")}

    assert set(re.findall(r"`(\w+\.py)`", PAGE)) - there == set()
