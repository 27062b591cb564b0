"""Every command, argument and option of the official command line is one of ours too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import click
import pytest
from tinker.cli.__main__ import main_cli as official

from tinsmith.cli.completion import Level, levels
from tinsmith.cli.main import root_parser


def official_commands(
    command: click.Command = official, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from official_commands(below, (*words, name))


OFFICIAL = dict(official_commands())
OURS: dict[tuple[str, ...], Level] = {level.words: level for level in levels(root_parser())}


def test_every_official_command_exists() -> None:
    assert len(OFFICIAL) > 20
    assert set(OFFICIAL) <= set(OURS)


@pytest.mark.parametrize("words", OFFICIAL, ids=lambda words: " ".join(words) or "root")
def test_every_official_option_exists_and_takes_the_same_kind_of_value(
    words: tuple[str, ...],
) -> None:
    ours = {name: option for option in OURS[words].options for name in option.option_strings}

    for parameter in OFFICIAL[words].params:
        if isinstance(parameter, click.Option):
            assert set(parameter.opts) <= set(ours), parameter.name
            option = ours[parameter.opts[0]]
            assert (option.nargs == 0) == bool(parameter.is_flag), parameter.name
            repeats = isinstance(option, argparse._AppendAction)
            assert repeats == parameter.multiple, parameter.name
            if isinstance(parameter.type, click.Choice):
                assert set(parameter.type.choices) <= set(option.choices or ()), parameter.name


@pytest.mark.parametrize("words", OFFICIAL, ids=lambda words: " ".join(words) or "root")
def test_every_official_argument_exists_in_its_position(words: tuple[str, ...]) -> None:
    official_ones = [
        (p.name, "*" if p.nargs == -1 else None if p.required else "?")
        for p in OFFICIAL[words].params
        if isinstance(p, click.Argument)
    ]

    assert [(a.dest, a.nargs) for a in OURS[words].arguments] == official_ones


def test_defaults_are_the_official_ones() -> None:
    for words in (("run", "list"), ("checkpoint", "list")):
        ours = {option.dest: option.default for option in OURS[words].options}
        (limit,) = (p for p in OFFICIAL[words].params if p.name == "limit")

        assert ours["limit"] == limit.default


def test_run_columns_are_the_official_ones_plus_our_own() -> None:
    from tinker.cli.commands import run as official_run

    from tinsmith.cli import run

    ours = {"name", "steps", "loss"}
    assert [name for name in run.COLUMNS if name not in ours] == list(
        official_run.AVAILABLE_COLUMNS
    )
    assert [
        name for name in run.DEFAULT_COLUMNS if name not in ours
    ] == official_run.DEFAULT_COLUMNS
