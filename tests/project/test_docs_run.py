"""Examples run as printed: every ```python block of the README and of docs/, each on its own.

An embedded service uses its own data folder and the fake engine, and a tokenizer that needs no hub.
A block that is not meant to run is marked ```text, or with another language.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.contract.test_tokenizers_like_transformers import qwen_files
from tinsmith.engine.files.sources import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Indented blocks, as in lists, end with a fence of the same indent.
BLOCK = re.compile(
    r"^(?P<indent> *)```python *\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
TIME_LIMIT_S = 300


def printed_examples() -> Iterator[ParameterSet]:
    """Each block of each page, identified by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
            # Empty lines ahead of it, so that a traceback shows the line of the page.
            program = "\n" * line + code
            yield pytest.param(page, program, id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("page", "program"), list(printed_examples()))
def test_each_documented_example_runs_as_printed(page: Path, program: str, tmp_path: Path) -> None:
    command = f"exec(compile({program!r}, {str(page)!r}, 'exec'))"

    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", command],
        cwd=tmp_path,
        env={
            **os.environ,
            "TINSMITH_HOME": str(tmp_path),
            "TINSMITH_SERVE_ENGINE": "fake",
            "TINSMITH_TOKENIZERS": json.dumps({DEFAULT_MODEL: str(qwen_files())}),
        },
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
