"""The completion scripts, and that bash completes with its own."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tinsmith.cli.completion import SHELLS, levels
from tinsmith.cli.main import NOUNS, main, root_parser

COMPLETE = """
{script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_tinsmith
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What bash offers for the last of some words."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    quoted = " ".join(f"'{word}'" for word in ["tinsmith", *words])
    finished = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(script=script, words=quoted)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert finished.stderr == ""
    return set(finished.stdout.split())


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@needs_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["che"], {"checkpoint"}),
        (["checkpoint", "pu"], {"publish", "push-hf"}),
        (["-f", "json", "run", "l"], {"list"}),
        (["run", "list", "--col"], {"--columns"}),
        (["run", "list", "--format", ""], {"table", "json"}),
        (["checkpoint", "delete", "--type", "s"], {"sampler", "sampler_weights"}),
        (["completion", "z"], {"zsh"}),
        (
            ["checkpoint", "download", "tinker://r/weights/w", "--fo"],
            {"--for", "--force", "--format"},
        ),
        (["run", "list", "--limit", ""], set()),
    ],
)
def test_bash_completes_commands_and_options(
    words: list[str], offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(words, capsys) == offered


@needs_bash
def test_bash_offers_every_noun_and_option_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert completed([""], capsys) >= {*NOUNS, "--format", "--help", "--version"}


@needs_bash
def test_bash_completes_files_where_an_option_takes_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert completed(["billing", "usage", "--csv", "/etc/pass"], capsys) >= {"/etc/passwd"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_every_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", shell])

    script = capsys.readouterr().out
    for level in levels(root_parser()):
        for option in level.options:
            long = option.option_strings[-1]
            assert (f"-l {long[2:]} " if shell == "fish" else long) in script, long
        assert all(name in script for name in level.commands)


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["completion", "tcsh", "-f", "json"])

    assert status == 2
    assert "tcsh" in json.loads(capsys.readouterr().err)["error"]["message"]
