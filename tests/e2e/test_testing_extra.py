"""`pip install 'tinsmith[testing]'` is all that the page on testing needs."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 300.0
WITHOUT_TORCH = """
import sys
assert "torch" not in sys.modules
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the extra brings torch")
"""


def test_the_documented_example_runs_in_a_clean_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [
            *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[testing]"),
        ],
        check=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    assert examples
    for example in examples:
        subprocess.run(
            [str(python), "-c", example + WITHOUT_TORCH],
            cwd=tmp_path,
            env=clean,
            check=True,
            timeout=RUN_TIMEOUT_S,
        )
