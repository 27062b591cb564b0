from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tinsmith.cli.main import main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that sets nothing, and a folder of its own."""
    for name in os.environ:
        if name.startswith("TINSMITH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TINSMITH_HOME", str(tmp_path))


def test_check_prints_the_settings_and_where_they_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_SERVE_DATABASE", "postgresql://me:hunter2@db/x")

    status = main(["serve", "--check", "--port", "81", "--model", "a=b", "--model", "c=b"])

    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert "port = 81  # --port\n" in shown.out
    assert 'models = ["a=b", "c=b"]  # --model\n' in shown.out
    assert "hunter2" not in shown.out


def test_check_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["serve", "--check", "--model", "a", "--no-metrics", "-f", "json"])

    shown = json.loads(capsys.readouterr().out)
    assert status == 0
    assert shown["metrics"] == {"value": False, "source": "--metrics"}
    assert shown["unix_socket"] == {"value": None, "source": "default"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "many"], "--port"),
        (["--engine", "steam"], "steam"),
        (["--prot", "1"], "--prot"),
        (["--engine", "fake"], "no model is given"),
        (["--model", "../x=1"], "is not a valid model name"),
        (["--model", "x=/nowhere/at/all"], "does not exist"),
        (["--tls-cert", "/nowhere"], "tls.key is missing"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "tls.cert: /nowhere"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--database", "mysql://me:hunter2@db"], "not a supported scheme"),
    ],
)
def test_check_exits_with_2_and_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            "serve",
            "--check",
            *(["--model", "a"] if not {"--model", "fake"} & {*words} else []),
            *words,
        ]
    )

    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert message in shown.err
    assert "hunter2" not in shown.err


def test_an_unknown_variable_is_rejected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_SERVE_HOSTS", "x")

    assert main(["serve", "--check"]) == 2
    assert "did you mean TINSMITH_SERVE_HOST?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "a CPU-only build"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "has no GPU"),
    ],
)
def test_a_missing_device_is_reported_before_anything_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: str,
    told: str,
) -> None:
    """A model was fetched and PyTorch loaded first, which took minutes."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it was loaded')")
    (package / "version.py").write_text(versions)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr("tinsmith.engine.registry._GPU_DEVICES", ("/no/such/device",))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)

    status = main(["serve", "--device", "cuda"])

    first, hint = capsys.readouterr().err.splitlines()
    assert status == 2
    assert told in first
    assert "--device" in hint
    assert not (tmp_path / "ledger").exists()
