from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tinsmith import __version__
from tinsmith.cli.completion import levels
from tinsmith.cli.main import NOUNS, main, root_parser


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])

    assert status == 0
    assert capsys.readouterr().out.startswith("usage: tinsmith")


def test_help_names_every_noun_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--help"])

    shown = capsys.readouterr().out
    assert status == 0
    assert all(summary in shown for summary in NOUNS.values())
    assert "exit codes: 0 success, 1 failure, 2 invalid usage, 130" in shown


def test_an_unknown_noun_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verson"])

    assert status == 2
    assert "verson" in capsys.readouterr().err


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_its_own_module_and_help(
    noun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([noun, "--help"])

    assert status == 0
    assert f"usage: tinsmith {noun}" in capsys.readouterr().out


def test_every_command_has_help_that_describes_its_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for level in levels(root_parser()):
        status = main([*level.words, "--help"])

        shown = capsys.readouterr().out
        assert status == 0
        assert all(option.help for option in level.options), level.words
        assert all(level.commands.values()), level.words
        assert shown.startswith(f"usage: {' '.join(('tinsmith', *level.words))}")


def test_a_noun_without_a_verb_is_a_usage_error_and_lists_the_verbs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["run"])

    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert "list training runs" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ["-f", "json", "run", "lst"],
        ["run", "list", "--format=json", "--no-such-option"],
        ["run", "info", "--format", "json"],
        ["run", "-f", "json"],
        ["run", "list", "--limit", "-1", "-fjson"],
        ["run", "list", "--columns", "id,colour", "-f", "json"],
        ["checkpoint", "info", "not-a-path", "-f", "json"],
        ["checkpoint", "delete", "--run-id", "r", "--before", "yesterday", "-f", "json"],
        ["billing", "usage", "monday", "tuesday", "-f", "json"],
    ],
)
def test_a_usage_error_in_json_mode_is_json(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(words)

    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert json.loads(shown.err)["error"]["type"] == "UsageError"


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("0", 80), ("wide", 80)])
def test_help_is_as_wide_as_the_terminal(
    columns: str,
    widest: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    main(["run", "list", "--help"])

    lengths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert widest - 20 < max(lengths) <= widest


def test_options_cannot_be_abbreviated() -> None:
    assert main(["run", "list", "--lim", "3"]) == 2


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_number_above_zero(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "list", "--timeout", value]) == 2
    assert "--timeout" in capsys.readouterr().err


def test_package_runs_as_the_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tinsmith", "--version"], capture_output=True, text=True, check=True
    )

    assert finished.stdout == f"tinsmith {__version__}\n"
