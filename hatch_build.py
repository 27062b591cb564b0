"""Compiles the kernels of the engine (`src/tinsmith/engine/model/kernels`) when tinsmith is built.

One shared library for each kind of machine that this one's processor family has; which of them is
loaded is found out at run time. Nothing depends on them: without a compiler, or where it fails, the
package is built without, and the engine computes with PyTorch alone.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/tinsmith/engine/model/kernels")
SECONDS = 300.0
"""For a compiler that hangs."""
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp"]
"""A compiler without OpenMP fails: kernels of one thread were not tried beside PyTorch of many."""
_X86_FLAGS = {
    "x86-64-v3": ["-march=x86-64-v3"],
    "x86-64-v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "x86-64-v4-bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
}


def variants() -> dict[str, list[str]]:
    """The compiler's flags for each kind of machine, by its name; none where nobody has tried."""
    if sys.platform not in ("linux", "darwin"):
        return {}
    machine = platform.machine()
    return _X86_FLAGS if machine in ("x86_64", "AMD64") else {machine: []}


def compile_kernels(root: Path) -> list[str]:
    """Compile for each kind of machine; the libraries' names, and none without a compiler.

    What was compiled before is then taken away, and stays if this fails.

    Raises:
        OSError, subprocess.SubprocessError: The compiler failed; its words are in `stderr`.
    """
    folder = root / FOLDER
    found = shutil.which("cc") or shutil.which("gcc") or "clang"
    compiler = shlex.split(os.environ.get("CC", "")) or [found]
    if not variants() or shutil.which(compiler[0]) is None:
        return []
    sources = sorted(map(str, folder.glob("*.c")))
    path_of = runpy.run_path(str(folder / "library_path.py"))["library_path"]
    with tempfile.TemporaryDirectory() as temporary:
        built = {path_of(kind, folder): Path(temporary, kind) for kind in variants()}
        for flags, made in zip(variants().values(), built.values(), strict=True):
            _run([*compiler, *_FLAGS, *flags, *sources, "-o", str(made), "-lm"])
        for path, made in built.items():
            # In one step: another install may read, or write, the same library.
            beside = path.with_suffix(f".{os.getpid()}.new")
            shutil.copyfile(made, beside)
            beside.replace(path)
    for old in set(folder.glob("*.so")) - built.keys():
        old.unlink(missing_ok=True)
    return [path.name for path in built]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)  # noqa: S603


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg] # of any configuration
    """What hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile before files are gathered; a wheel with kernels is for this platform alone."""
        if self.target_name != "wheel":
            return
        try:
            made = compile_kernels(Path(self.root))
        except (OSError, subprocess.SubprocessError) as exc:
            told = getattr(exc, "stderr", None) or exc
            self.app.display_warning(f"the engine's kernels were not compiled: {told}")
            return
        if not made:
            self.app.display_warning(
                "no C compiler for here: the engine computes with PyTorch alone"
            )
            return
        build_data["artifacts"] += [f"/{FOLDER}/{name}" for name in made]
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
