"""Compiling the engine's kernels during the build, in a copy of their folder."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import platform
import re
import runpy
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hatchling.bridge.app import Application

from tinsmith.engine.model.kernels import library, library_path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="this machine has no C compiler")


def _hatch_build() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _hatch_build()


class Told(Application):
    """A stand-in for hatchling's application object that records warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def display_warning(self, message: str = "", **_: Any) -> None:
        self.warnings.append(message)


class Tree:
    """A source tree with nothing but a few small kernels."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / build.FOLDER
        self.folder.mkdir(parents=True)
        shutil.copy(library_path.__file__, self.folder)
        (self.folder / "rows.c").write_text("int tinsmith_one(void) { return 1; }\n")

    def compiler_is(self, script: str) -> str:
        path = self.root / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def libraries(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.so"))

    def build(self) -> tuple[dict[str, Any], list[str]]:
        """What a wheel's build is told, and which warnings are shown."""
        app = Told()
        hook = build.KernelsHook(str(self.root), {}, None, None, "", "wheel", app)
        build_data: dict[str, Any] = {"artifacts": [], "pure_python": True, "tag": None}
        hook.initialize("standard", build_data)
        return build_data, app.warnings


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.delenv("CC", raising=False)
    return Tree(tmp_path)


@needs_compiler
def test_a_wheel_with_kernels_is_for_this_platform(tree: Tree) -> None:
    build_data, warnings = tree.build()

    made = tree.libraries()
    assert len(made) == len(build.variants())
    assert sorted(build_data["artifacts"]) == [f"/{build.FOLDER}/{name}" for name in made]
    assert not build_data["pure_python"]
    assert build_data["tag"].startswith("py3-none-")
    assert platform.machine() in build_data["tag"]
    assert warnings == []
    assert ctypes.CDLL(str(tree.folder / made[0])).tinsmith_one() == 1


@needs_compiler
def test_compiled_libraries_are_found_by_name(tree: Tree) -> None:
    made = build.compile_kernels(tree.root)

    assert made == [library_path.library_path(kind, tree.folder).name for kind in build.variants()]


@needs_compiler
def test_changed_sources_replace_the_old_libraries(tree: Tree) -> None:
    """A library of an older checkout is never loaded."""
    before = build.compile_kernels(tree.root)
    (tree.folder / "rows.c").write_text("int tinsmith_two(void) { return 2; }\n")
    is_stale = not any(
        library_path.library_path(kind, tree.folder).exists() for kind in build.variants()
    )

    after = build.compile_kernels(tree.root)

    assert is_stale
    assert set(before).isdisjoint(after)
    assert tree.libraries() == sorted(after)


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "nobody-has-this-compiler -O1"])
def test_without_a_compiler_the_wheel_is_pure_python(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)

    build_data, warnings = tree.build()

    assert build.compile_kernels(tree.root) == []
    assert build_data == {"artifacts": [], "pure_python": True, "tag": None}
    (warning,) = warnings
    assert "PyTorch alone" in warning


def test_a_failing_compiler_does_not_fail_the_build(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", tree.compiler_is("echo no such flag >&2; exit 1"))

    build_data, warnings = tree.build()

    assert build_data == {"artifacts": [], "pure_python": True, "tag": None}
    (warning,) = warnings
    assert "no such flag" in warning


@needs_compiler
def test_a_compiler_that_fails_midway_changes_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The existing libraries may be in use by an editable install."""
    before = build.compile_kernels(tree.root)
    script = f'case "$*" in *-mavx512bf16*) exit 1;; esac; exec {COMPILER} "$@"'
    monkeypatch.setenv("CC", tree.compiler_is(script))
    monkeypatch.setattr(build, "variants", lambda: {"one": [], "two": ["-mavx512bf16"]})

    build_data, warnings = tree.build()

    assert tree.libraries() == sorted(before)
    assert build_data["artifacts"] == []
    assert len(warnings) == 1


@needs_compiler
def test_a_compiler_without_openmp_is_not_used(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with one thread would be slower than PyTorch with several."""
    script = f'case "$*" in *-fopenmp*) exit 1;; esac; exec {COMPILER} "$@"'
    monkeypatch.setenv("CC", tree.compiler_is(script))

    build_data, warnings = tree.build()

    assert tree.libraries() == build_data["artifacts"] == []
    assert len(warnings) == 1


def test_the_sources_define_the_functions_that_python_calls() -> None:
    sources = "".join(path.read_text() for path in library_path.FOLDER.glob("*.c"))

    defined = re.findall(r"^\w+ tinsmith_(\w+)\(", sources, re.MULTILINE)

    assert sorted(defined) == sorted(library._ARGUMENTS)


def test_the_machine_looks_for_a_variant_that_is_compiled() -> None:
    if library.kernels() is None:
        pytest.skip("there are no kernels on this machine")

    assert library._instruction_set() in build.variants()


def test_a_library_for_another_machine_is_skipped_with_a_warning(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was compiled for another processor, or against missing libraries."""
    path = tree.folder / "other.so"
    path.write_bytes(b"\x7fELF of somebody else")
    monkeypatch.setattr(library, "library_path", lambda _kind: path)
    monkeypatch.delenv(library.SWITCH, raising=False)

    with caplog.at_level(logging.WARNING):
        found = library.kernels.__wrapped__()

    assert found is None
    assert "cannot be loaded" in caplog.text


def test_library_names_are_computed_without_the_package() -> None:
    """The build has neither torch nor tinsmith."""
    alone = runpy.run_path(str(library_path.FOLDER / "library_path.py"))

    assert alone["library_path"]("kind") == library_path.library_path("kind")
