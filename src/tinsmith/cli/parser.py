"""The parser of the command line: nouns that load when they are chosen, options that go anywhere.

`tinsmith <noun> <verb> …`. A noun's module is `tinsmith.cli.<noun>`; its `configure(parser)` adds
verbs or arguments and says which function runs them. Such a module loads nothing of the client
before it runs, so that every `--help` stays instant.

`--format`, `--base-url` and `--timeout` are options of every parser of the tree, and so may stand
anywhere on the line.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

Run = Callable[[argparse.Namespace], int | None]
"""Runs a command; None means that it went well."""

FORMATS = ("table", "json")
_KINDS = ("weights", "sampler_weights", "external_weights")

EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 141 the reader of a pipe left
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises on mistakes, and takes the options that every command has.

    Args:
        noun: The noun whose module is to add its arguments, when they are first needed.
    """

    def __init__(self, *args: Any, noun: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._noun = noun
        self._verbs: Any = None
        # The last one that is entered wins: what `main` shows help of where no verb was given.
        self.set_defaults(parser=self)
        self._add_common_options()

    def _add_common_options(self) -> None:
        common = self.add_argument_group("options of every command")
        # Not set unless given: a verb must not put its default over what its noun was given.
        not_given = argparse.SUPPRESS
        common.add_argument(
            "-f", "--format", choices=FORMATS, default=not_given, help="table (default) or json"
        )
        common.add_argument(
            "--base-url",
            metavar="URL",
            default=not_given,
            help="where the service is, instead of TINKER_BASE_URL",
        )
        common.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=seconds,
            default=not_given,
            help="how long to wait for the service before giving up",
        )

    def add_verb(self, name: str, summary: str, run: Run, description: str = "") -> Parser:
        """Add a verb of this noun; returns its parser, for its arguments."""
        if self._verbs is None:
            self._verbs = self.add_subparsers(
                dest="verb", metavar="command", title="commands", parser_class=Parser
            )
        verb: Parser = self._verbs.add_parser(
            name, help=summary, description=_sentence(summary) + description
        )
        verb.set_defaults(run=run)
        return verb

    def fill(self) -> None:
        """Let the noun's module add its verbs and arguments, if it has not yet."""
        if self._noun is not None:
            noun, self._noun = self._noun, None
            importlib.import_module(f"tinsmith.cli.{noun}").configure(self)

    def parse_known_args(  # type: ignore[override]  # the overloads all come here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As the library's; called for a noun when it is chosen."""
        self.fill()
        found, left = super().parse_known_args(args, namespace)
        flag = next((word for word in left if word.startswith("--")), "").partition("=")[0]
        near = _nearest(flag, self._option_string_actions) if flag else ""
        if near:  # else whoever called us says what is left
            self.error(f"unrecognized arguments: {' '.join(left)}{near}")
        return found, left

    def parse_args(  # type: ignore[override]  # the overloads all come here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As the library's; what nobody takes is refused by the parser of the command."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            found.parser.error(f"unrecognized arguments: {' '.join(left)}")
        return found

    def error(self, message: str) -> Any:
        """Say what is wrong with the line.

        Raises:
            UsageError: Always.
        """
        import re

        from tinsmith.cli.failures import UsageError

        chosen = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if chosen is not None:
            message += _nearest(chosen[1], re.findall(r"[\w-]+", chosen[2]))
        raise UsageError(message, remedy=f"see `{self.prog} --help`")


def _nearest(word: str, known: Iterable[str]) -> str:
    """A question for who has mistyped a word; empty if none is like it."""
    import difflib  # no help needs it

    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal; the library would load archives to learn how wide that is."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": _width() - 2, **options})


def _width() -> int:
    """How wide the terminal is; 80 columns if there is none, or one that does not know."""
    try:
        columns = int(os.environ.get("COLUMNS", "0"))
        columns = columns or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        columns = 0
    return columns if columns > 0 else 80


def new_parser(nouns: dict[str, str], **kwargs: Any) -> Parser:
    """The root of the tree.

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
    """A time to wait, for `type=` of an argument."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def count(text: str) -> int:
    """A whole number of 0 or more, for `type=` of an argument."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive(text: str) -> int:
    """A whole number of 1 or more, for `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def checkpoint_path(text: str) -> str:
    """The path of a saved checkpoint, for `type=` of an argument."""
    parts = model_path(text).removeprefix("tinker://").split("/")
    if len(parts) != 3 or not all(parts) or parts[1] not in _KINDS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.200} is not a checkpoint; one looks like tinker://<run>/<kind>/<name>, "
            f"and the kinds are {', '.join(_KINDS)}"
        )
    return text


def model_path(text: str) -> str:
    """What can be sampled from, for `type=` of an argument; the service knows what there is."""
    if not text.startswith("tinker://"):
        raise argparse.ArgumentTypeError(
            f"{text!r:.200} is not a checkpoint; one begins with tinker://"
        )
    return text


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
