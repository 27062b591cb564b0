"""The reference of the command line, read from the parser itself."""

from __future__ import annotations

import argparse

from scripts.reference_pages.markdown import code, sentence, table
from tinsmith.cli.completion import Level, levels
from tinsmith.cli.main import root_parser

COMMON = ("--help", "--format", "--base-url", "--timeout")
"""Options of every command, listed once."""
INTRODUCTION = """\
# Commands

For users of the shell who look up an option: every command, as `--help` shows it.
[The command line](../cli.md) is the guide.
"""


def page() -> str:
    """The whole page."""
    tree = list(levels(root_parser()))
    shown = [level for level in tree if level.words and not level.commands]
    commands = ((_link(level), _summary(tree, level)) for level in shown)
    common = [one for one in tree[0].options if one.option_strings[-1] in (*COMMON, "--version")]
    parts = [INTRODUCTION.rstrip(), table(("command", "what it does"), commands)]
    parts += ["Every command takes these options, anywhere on the line:", _options(common)]
    parts += [_section(tree, level) for level in shown]
    return "\n\n".join(parts) + "\n"


def _link(level: Level) -> str:
    words = " ".join(level.words)
    return f"[`{words}`](#tinsmith-{words.replace(' ', '-')})"


def _summary(tree: list[Level], level: Level) -> str:
    """The command's line in the help of its parent."""
    [above] = [one for one in tree if one.words == level.words[:-1]]
    return above.commands[level.words[-1]]


def _section(tree: list[Level], level: Level) -> str:
    own = [one for one in level.options if one.option_strings[-1] not in COMMON]
    parts = [f"## tinsmith {' '.join(level.words)}", sentence(_summary(tree, level))]
    if level.arguments:
        parts.append(table(("argument", "meaning"), map(_argument, level.arguments)))
    if level.words == ("serve",):
        settings = [one for one in own if one.dest.startswith("setting_")]
        own = [one for one in own if one not in settings]
        parts.append("Every [setting](settings.md) is an option, too.")
    if own:
        parts.append(_options(own))
    return "\n\n".join(parts)


def _options(options: list[argparse.Action]) -> str:
    return table(("option", "what it does"), map(_option, options))


def _option(option: argparse.Action) -> tuple[str, str]:
    names = ", ".join(option.option_strings)
    value = "" if option.nargs == 0 else f" {_value(option)}"
    return code(names + value), _help(option)


def _argument(argument: argparse.Action) -> tuple[str, str]:
    name = _value(argument)
    shown = {"?": f"[{name}]", "*": f"[{name} …]", "+": f"{name} [{name} …]"}
    return code(shown.get(str(argument.nargs), name)), _help(argument)


def _value(option: argparse.Action) -> str:
    """The placeholder of a value, or its choices."""
    if option.metavar is not None:
        return option.metavar if isinstance(option.metavar, str) else " ".join(option.metavar)
    if option.choices is not None:
        return "{" + ",".join(map(str, option.choices)) + "}"
    return option.dest.upper() if option.option_strings else option.dest


def _help(option: argparse.Action) -> str:
    text = (option.help or "").replace("%(default)s", str(option.default)).replace("%%", "%")
    text = text.replace("<", "&lt;")  # not a tag
    return f"{text} (required)" if option.option_strings and option.required else text
