"""The public names: listed, loadable, and the same for people and for type checkers."""

from __future__ import annotations

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import tinsmith
from tinsmith import errors

ROOT = Path(__file__).resolve().parents[2]


def names_for_type_checkers() -> set[str]:
    """What `tinsmith/__init__.py` imports under `if TYPE_CHECKING`."""
    tree = ast.parse((ROOT / "src/tinsmith/__init__.py").read_text(encoding="utf-8"))
    guarded = [
        statement
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
    ]
    return {
        alias.asname or alias.name
        for statement in guarded
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_listed_names_are_current() -> None:
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts/public_names.py"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_type_checkers_see_the_names_that_exist() -> None:
    assert names_for_type_checkers() == set(tinsmith.__all__)


def test_every_error_is_public() -> None:
    """Every error can be caught by a name from `tinsmith`."""
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__ and name[0] != "_"
    }

    assert defined <= set(tinsmith.__all__)


def test_dir_shows_names_that_are_not_loaded_yet() -> None:
    assert set(tinsmith.__all__) <= set(dir(tinsmith))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'tinsmith' has no attribute 'no_such_name'"):
        _ = tinsmith.no_such_name  # type: ignore[attr-defined]


def test_help_lists_every_public_name() -> None:
    """`help()` resolves annotations, including those imported for type checkers only."""
    for name in tinsmith.__all__:
        value = getattr(tinsmith, name)
        assert not callable(value) or pydoc.render_doc(value), name
