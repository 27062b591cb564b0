"""Compiles the kernels of the engine (`src/tinsmith/model/kernels`) when tinsmith is built.

One shared library for each kind of machine that this one's processor family has; which of them is
loaded is found out at run time. Nothing depends on them: without a compiler, or where it fails, the
package is built without, and the engine computes with PyTorch alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/tinsmith/model/kernels")
SECONDS = 300.0
"""For a compiler that hangs."""
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
    """Compile what this machine can; the libraries' names, and none without a compiler.

    Raises:
        OSError, subprocess.SubprocessError: The compiler failed; its words are in `stderr`.
    """
    folder = root / FOLDER
    for old in folder.glob("*.so"):
        old.unlink()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "clang"
    if shutil.which(compiler.split()[0]) is None:
        return []
    made: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, flags in variants().items():
            built = Path(temporary) / f"{name}.so"
            _compile(compiler.split(), flags, sorted(folder.glob("*.c")), built)
            # In one step: another install may read, or write, the same library.
            beside = folder / f"{name}.{os.getpid()}.new"
            shutil.copyfile(built, beside)
            beside.replace(folder / built.name)
            made.append(built.name)
    return made


def _compile(compiler: list[str], flags: list[str], sources: list[Path], built: Path) -> None:
    command = [*compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", *flags, *map(str, sources)]
    try:
        _run([*command, "-fopenmp", "-o", str(built), "-lm"])
    except subprocess.CalledProcessError:  # a compiler without OpenMP: then of one thread
        _run([*command, "-o", str(built), "-lm"])


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
            self.app.display_warning("no C compiler: the engine will compute with PyTorch alone")
            return
        build_data["artifacts"] += [f"/{FOLDER}/{name}" for name in made]
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
