"""The page on the architecture names the modules that there are, and no others."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOME = ROOT / "src" / "tinsmith" / "client"
CLIENT = sorted(str(module.relative_to(HOME)) for module in HOME.rglob("[!_]*.py"))


@pytest.mark.parametrize("module", CLIENT)
def test_every_module_of_the_client_is_listed(module: str) -> None:
    assert f"| `{module}` | " in PAGE


def test_every_module_that_the_page_names_exists() -> None:
    package = ROOT / "src" / "tinsmith"
    there = {path.name for path in package.rglob("*.py")} | set(CLIENT)
    there |= {str(path.relative_to(package)) for path in package.rglob("*.py")}

    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert {name for name in named - there if not (ROOT / name).exists()} == set()


def test_the_page_shows_the_layers_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [layers] = [
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]

    assert "".join(f"    {layer}\n" for layer in layers) in PAGE
