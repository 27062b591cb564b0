"""The page on the architecture names what exists, and every part of the package."""

from __future__ import annotations

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tinsmith"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+(?:\.\w+)?)?|\w+\.py)`", PAGE))

    assert len(named) > 20
    missing = {one for one in named if not (PACKAGE / one).exists() and not (ROOT / one).exists()}
    assert missing == set()


def test_every_part_of_the_package_is_on_the_page() -> None:
    folders = [PACKAGE, PACKAGE / "service", PACKAGE / "engine"]
    parts = {
        part.relative_to(PACKAGE).as_posix()
        for folder in folders
        for part in folder.iterdir()
        if (part / "__init__.py").exists()
    }

    assert {part for part in parts if f"`{part}/`" not in PAGE} == set()


def test_the_page_shows_the_layers_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )

    assert "".join(f"    {layer}\n" for layer in layers) in PAGE
