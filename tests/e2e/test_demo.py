"""A whole `tinsmith demo`, with a tiny random model."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.contract.test_tokenizers_like_transformers import qwen_files
from tests.numerics.small_models import make_model


def test_the_demo_is_reproducible_and_survives_a_crash_bit_for_bit(
    tmp_path: Path,
) -> None:
    """A random model learns little, but every step, the crash and the report are real."""
    model = tmp_path / "model"
    make_model(model, "Qwen3", vocab_size=151_936, hidden_size=32, eos_token_id=151_645)
    for file in qwen_files().iterdir():
        shutil.copy(file, model)

    first, second = (_printed_by_demo(model, tmp_path / name) for name in ("first", "second"))

    assert "results are bit-identical" in first
    assert "client log:" not in first, "a normal run causes no warning"
    losses = [float(found) for found in re.findall(r"loss per token (\d+\.\d+) ", first)]
    assert losses[0] > losses[3], "training lowers the loss"
    assert _steps(first) == _steps(second) != []
    page = (tmp_path / "first" / "demo.html").read_text()
    assert (tmp_path / "first" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<svg") == 2 and page.count("<table>") == 4
    for promised in ("Hyperparameters", "Kill and restart", "Reward: 1 if the answer", "viewport"):
        assert promised in page
    assert "mean reward on 3 held-out questions" in first


def _printed_by_demo(model: Path, out: Path) -> str:
    command = [sys.executable, "-m", "tinsmith", "demo", "--quick", f"--model={model}"]
    ended = subprocess.run(
        [*command, f"--out={out}", f"--data={out / 'home'}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr + (out / "demo-data" / "service.log").read_text()
    return ended.stdout


def _steps(printed: str) -> list[str]:
    """The lines with computed values."""
    return re.findall(r"step +\d+/.*|undisturbed .*|killed .*loss.*", printed)
