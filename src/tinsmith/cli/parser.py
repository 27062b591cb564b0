"""The command-line parser: `tinsmith <noun> <verb> …`, with nouns loaded on demand.

A noun's module is `tinsmith.cli.<noun>`. Its `configure(parser)` adds verbs or arguments and sets
the function that runs them. These modules import the client only when a command runs, so that
`--help` is instant.

Every parser of the tree takes `--format`, `--base-url` and `--timeout`, so they may stand anywhere
on the line.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

Run = Callable[[argparse.Namespace], int | None]
"""Runs a command and returns its exit code; None means 0."""

FORMATS = ("table", "json")
_KINDS = ("weights", "sampler_weights", "external_weights")

EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid usage, 130 interrupted (Ctrl-C), 141 broken pipe
"""


class Parser(argparse.ArgumentParser):
    """A parser with the common options that raises `UsageError` for an invalid line.

    Args:
        noun: The noun whose module adds the arguments, when they are first needed.
    """

    def __init__(self, *args: Any, noun: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._noun = noun
        self._verbs: Any = None
        # The innermost parser wins; `main` prints its help if the verb is missing.
        self.set_defaults(parser=self)
        self._add_common_options()

    def _add_common_options(self) -> None:
        common = self.add_argument_group("common options")
        # No default here: a verb's default would overwrite what was given before the verb.
        not_given = argparse.SUPPRESS
        common.add_argument(
            "-f",
            "--format",
            choices=FORMATS,
            default=not_given,
            help="output format (default: table)",
        )
        common.add_argument(
            "--base-url",
            metavar="URL",
            default=not_given,
            help="address of the service (default: TINKER_BASE_URL)",
        )
        common.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=seconds,
            default=not_given,
            help="give up if the service has not answered by then",
        )

    def add_verb(self, name: str, summary: str, run: Run | str, description: str = "") -> Parser:
        """Add a verb to this noun and return its parser.

        Args:
            name: The verb.
            summary: Its line in the help.
            run: The function that runs it, or `module:function` to import it only then.
            description: Further sentences for its own help.
        """
        if self._verbs is None:
            self._verbs = self.add_subparsers(
                dest="verb", metavar="command", title="commands", parser_class=Parser
            )
        verb: Parser = self._verbs.add_parser(
            name, help=summary, description=_sentence(summary) + description
        )
        verb.set_defaults(run=_imported_later(run) if isinstance(run, str) else run)
        return verb

    def fill(self) -> None:
        """Have the noun's module add its verbs and arguments, once."""
        if self._noun is not None:
            noun, self._noun = self._noun, None
            importlib.import_module(f"tinsmith.cli.{noun}").configure(self)

    def parse_known_args(  # type: ignore[override]  # the overloads all come here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Override: fill in a noun when it is chosen, and suggest the nearest flag."""
        self.fill()
        found, left = super().parse_known_args(args, namespace)
        flag = next((word for word in left if word.startswith("--")), "").partition("=")[0]
        near = _nearest(flag, self._option_string_actions) if flag else ""
        if near:  # else the parser above reports it
            self.error(f"unrecognized arguments: {' '.join(left)}{near}")
        return found, left

    def parse_args(  # type: ignore[override]  # the overloads all come here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Override: report unrecognized arguments with the usage of the chosen command."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            found.parser.error(f"unrecognized arguments: {' '.join(left)}")
        return found

    def error(self, message: str) -> Any:
        """Override: raise instead of exiting.

        Raises:
            UsageError: Always.
        """
        import re

        from tinsmith.cli.command_errors import UsageError

        chosen = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if chosen is not None:
            message += _nearest(chosen[1], re.findall(r"[\w-]+", chosen[2]))
        raise UsageError(message, remedy=f"run `{self.prog} --help` for usage")


def _imported_later(name: str) -> Run:
    module, _, function = name.partition(":")

    def run(arguments: argparse.Namespace) -> int | None:
        status: int | None = getattr(importlib.import_module(module), function)(arguments)
        return status

    return run


def _nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion for a mistyped word; empty if none is similar."""
    import difflib  # not needed for --help

    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal; argparse itself would import shutil to find the width.

    Paragraphs are wrapped, except those with indented lines, such as lists.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": _width() - 2, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part if "\n  " in f"\n{part}" else super(_Help, self)._fill_text(part, width, indent)
            for part in paragraphs
        )


def _width() -> int:
    """The width of the terminal; 80 columns if unknown."""
    try:
        columns = int(os.environ.get("COLUMNS", "0"))
        columns = columns or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        columns = 0
    return columns if columns > 0 else 80


def new_parser(nouns: dict[str, str], **kwargs: Any) -> Parser:
    """The root parser.

    Args:
        nouns: Each noun and its line in the help.
        kwargs: For the parser itself.
    """
    root = Parser(**kwargs)
    root.set_defaults(format="table", base_url=None, timeout=None, run=None)
    branches = root.add_subparsers(
        dest="noun", metavar="command", title="commands", parser_class=Parser
    )
    for noun, summary in nouns.items():
        branches.add_parser(noun, noun=noun, help=summary, description=_sentence(summary))
    return root


def seconds(text: str) -> float:
    """An argument `type=`: a positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
    return value


def count(text: str) -> int:
    """An argument `type=`: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


def positive(text: str) -> int:
    """An argument `type=`: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def metadata_pair(text: str) -> tuple[str, str]:
    """An argument `type=`: metadata as KEY=VALUE."""
    key, mark, value = text.partition("=")
    if not key or not mark:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r:.200}")
    return key, value


def checkpoint_path(text: str) -> str:
    """An argument `type=`: the path of a checkpoint."""
    parts = model_path(text).removeprefix("tinker://").split("/")
    if len(parts) != 3 or not all(parts) or parts[1] not in _KINDS:
        raise argparse.ArgumentTypeError(
            f"invalid checkpoint path {text!r:.200}: expected tinker://RUN/KIND/NAME, KIND being "
            f"one of {', '.join(_KINDS)}"
        )
    return text


def model_path(text: str) -> str:
    """An argument `type=`: the path of a checkpoint or sampler; the service checks the rest."""
    if not text.startswith("tinker://"):
        raise argparse.ArgumentTypeError(
            f"invalid checkpoint path {text!r:.200}: expected a path that starts with tinker://"
        )
    return text


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
