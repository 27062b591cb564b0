from __future__ import annotations

import subprocess
import sys

import pytest

from tinsmith import __version__
from tinsmith.cli.main import NOUNS, main


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])

    assert status == 0
    assert capsys.readouterr().out.startswith("usage: tinsmith")


def test_help_names_every_noun_and_says_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])

    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(summary in shown for summary in NOUNS.values())
    assert "no service that trains a model yet" in shown


def test_unknown_noun_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verson"])

    assert stopped.value.code == 2
    assert "verson" in capsys.readouterr().err


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_a_module_and_help_of_its_own(
    noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([noun, "--help"])

    assert stopped.value.code == 0
    assert f"usage: tinsmith {noun}" in capsys.readouterr().out


def test_package_runs_as_the_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tinsmith", "--version"], capture_output=True, text=True, check=True
    )

    assert finished.stdout == f"tinsmith {__version__}\n"
