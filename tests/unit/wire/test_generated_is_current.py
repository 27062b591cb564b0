from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TAGS = Path("src/tinsmith/wire/generated/tags.py")
ORACLE = Path("tests/oracle/tinsmith_pb2.py")
PROTO = Path("proto/tinsmith.proto")
SCRIPT = Path("scripts/regenerate_proto.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the schema and of all that is made of it."""
    for path in (TAGS, ORACLE, PROTO, SCRIPT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def regenerate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_the_generated_modules_are_up_to_date() -> None:
    done = regenerate(ROOT, "--check")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "old", "new", "stale"),
    [
        (PROTO, "bytes tokens = 2;", "bytes tokens = 9;", [TAGS, ORACLE]),
        (TAGS, "SAMPLED_SEQUENCE__TOKENS = 0x12", "SAMPLED_SEQUENCE__TOKENS = 0x1A", [TAGS]),
        (ORACLE, "# -*- coding: utf-8 -*-", "# edited by hand", [ORACLE]),
    ],
)
def test_a_change_to_only_the_schema_or_the_module_is_detected(
    checkout: Path, path: Path, old: str, new: str, stale: list[Path]
) -> None:
    text = (checkout / path).read_text()
    assert old in text
    (checkout / path).write_text(text.replace(old, new))

    done = regenerate(checkout, "--check")

    assert done.returncode == 1
    for made in (TAGS, ORACLE):
        assert (str(made) in done.stdout) is (made in stale)


def test_a_missing_module_is_detected_and_generated(checkout: Path) -> None:
    (checkout / TAGS).unlink()

    assert regenerate(checkout, "--check").returncode == 1
    assert regenerate(checkout).returncode == 0
    assert regenerate(checkout, "--check").returncode == 0
    assert (checkout / TAGS).read_text() == (ROOT / TAGS).read_text()


def test_an_invalid_schema_is_rejected(checkout: Path) -> None:
    (checkout / PROTO).write_text("message {")

    assert regenerate(checkout, "--check").returncode != 0
