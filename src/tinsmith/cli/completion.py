"""`tinsmith completion`: shell completion scripts, generated from the parser.

A script contains all commands and options, so completion does not start Python.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
# Options and arguments whose value is a path.
_PATHS = frozenset({"DIR", "FILE"})
_PATH_OPTIONS = frozenset({"--csv", "--sessions-csv"})

DESCRIPTION = """ Load it in your shell's startup file:

  bash  eval "$(tinsmith completion bash)"      in ~/.bashrc
  zsh   eval "$(tinsmith completion zsh)"       in ~/.zshrc, after compinit
  fish  tinsmith completion fish | source       in ~/.config/fish/config.fish
"""


def configure(parser: Parser) -> None:
    """Add the arguments of `tinsmith completion`."""
    parser.set_defaults(run=run)
    parser.description = (parser.description or "") + DESCRIPTION
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    from tinsmith.cli.main import root_parser

    write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[arguments.shell]
    print(write(root_parser()), end="")


class Level:
    """What may follow some words of the command line."""

    def __init__(self, words: tuple[str, ...], parser: Parser) -> None:
        parser.fill()
        self.words = words
        self.commands: dict[str, str] = {}
        self.parsers: dict[str, Parser] = {}
        self.options: list[argparse.Action] = []
        self.arguments: list[argparse.Action] = []
        self.choices: list[str] = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                self.parsers = dict(action.choices)
                shown = {choice.dest: choice.help or "" for choice in action._choices_actions}
                self.commands = {name: shown.get(name, "") for name in self.parsers}
            elif action.option_strings:
                self.options.append(action)
            else:
                self.arguments.append(action)
                self.choices += map(str, action.choices or ())

    @property
    def candidates(self) -> list[str]:
        """All words that may follow."""
        spelt = [name for option in self.options for name in option.option_strings]
        return [*self.commands, *self.choices, *spelt]


def levels(parser: Parser, words: tuple[str, ...] = ()) -> Iterator[Level]:
    """All levels of the tree, the root first."""
    level = Level(words, parser)
    yield level
    for name, below in level.parsers.items():
        yield from levels(below, (*words, name))


def _takes_path(option: argparse.Action) -> bool:
    is_named = bool(_PATH_OPTIONS.intersection(option.option_strings))
    return is_named or option.metavar in _PATHS


def _takes_value(option: argparse.Action) -> bool:
    return option.nargs != 0


def bash_script(parser: Parser) -> str:
    """The script for bash."""
    tree = list(levels(parser))
    cases = [f"        {_key(level)}) words='{' '.join(level.candidates)}' ;;" for level in tree]
    values = sorted({case for level in tree for option in level.options for case in _bash(option)})
    taking = sorted(
        {
            name
            for level in tree
            for option in level.options
            if _takes_value(option)
            for name in option.option_strings
        }
    )
    return BASH.format(
        cases="\n".join(cases),
        values="\n".join(values),
        taking="|".join(taking),
        keys="|".join(_key(level) for level in tree),
    )


def zsh_script(parser: Parser) -> str:
    """The script for zsh, which runs that for bash."""
    return (
        "#compdef tinsmith\n"
        "# The script for bash, loaded with zsh's bashcompinit.\n"
        "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(parser)
    )


def fish_script(parser: Parser) -> str:
    """The script for fish."""
    lines = ["complete -c tinsmith -f"]
    for level in levels(parser):
        here = f"-n {_quoted(_fish_condition(level))}"
        lines += [
            f"complete -c tinsmith {here} -a {name} -d {_quoted(summary)}"
            for name, summary in level.commands.items()
        ]
        lines += [f"complete -c tinsmith {here} -a {name}" for name in level.choices]
        lines += [f"complete -c tinsmith {here} {_fish(option)}" for option in level.options]
    return "\n".join(lines) + "\n"


def _key(level: Level) -> str:
    return "/".join(level.words) or "_"


def _bash(option: argparse.Action) -> list[str]:
    """The case that completes the value of an option, if its values are known."""
    spelt = "|".join(option.option_strings)
    if option.choices is not None:
        words = " ".join(map(str, option.choices))
        return [
            f"""        {spelt}) COMPREPLY=($(compgen -W '{words}' -- "$current")); return ;;"""
        ]
    if _takes_path(option):
        return [f"""        {spelt}) COMPREPLY=($(compgen -f -- "$current")); return ;;"""]
    return []


def _fish_condition(level: Level) -> str:
    if not level.words:
        return "__fish_use_subcommand"
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in level.words)
    below = " ".join(level.commands)
    return f"{seen}; and not __fish_seen_subcommand_from {below}" if below else seen


def _fish(option: argparse.Action) -> str:
    parts = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
        for name in option.option_strings
    ]
    if option.choices is not None:
        parts.append(f"-x -a {_quoted(' '.join(map(str, option.choices)))}")
    elif _takes_path(option):
        parts.append("-r -F")
    elif _takes_value(option):
        parts.append("-x")
    if option.help:
        parts.append(f"-d {_quoted(option.help)}")
    return " ".join(parts)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# Finds the command before the cursor, then offers what may follow.
BASH = r"""# Completion for tinsmith, generated by `tinsmith completion bash`.
_tinsmith() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local place='' next='' words='' number skips=''
    case "$previous" in
{values}
        {taking}) COMPREPLY=(); return ;;
    esac
    for ((number = 1; number < COMP_CWORD; number++)); do
        if [[ -n "$skips" ]]; then skips=''; continue; fi
        case "${{COMP_WORDS[number]}}" in
            {taking}) skips=1; continue ;;
            -*) continue ;;
        esac
        next="${{place:+$place/}}${{COMP_WORDS[number]}}"
        case "$next" in
            {keys}) place="$next" ;;
        esac
    done
    case "${{place:-_}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _tinsmith tinsmith
"""
