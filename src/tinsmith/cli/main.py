"""The `tinsmith` command: finds the noun and hands over to its module.

A noun's module is imported only when it is chosen, so that `tinsmith --help` stays instant however
much the commands behind it need. Such a module has `configure(parser)`, which adds its arguments
and sets `run`: a function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tinsmith._version import __version__

# Each noun and its line in the help; the module is `tinsmith.cli.<noun>`.
NOUNS = {
    "version": "show the versions of tinsmith and of what it runs on",
}

STATE = """\
What exists today: the types and codecs of the Tinker API, the core of a client in Python, and a
service for tests. There is no service that trains a model yet, and no further command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv` unless given, and return its exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = _parser(chosen)
    parsed = parser.parse_args(arguments)
    if parsed.noun is None:
        parser.print_help()
        return 0
    status: int = parsed.run(parsed)
    return status


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinsmith",
        description="The Tinker fine-tuning API on your own machines.",
        epilog=STATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tinsmith {__version__}")
    nouns = parser.add_subparsers(dest="noun", metavar="command", title="commands")
    for noun, summary in NOUNS.items():
        noun_parser = nouns.add_parser(noun, help=summary, description=f"{summary.capitalize()}.")
        if noun == chosen:
            importlib.import_module(f"tinsmith.cli.{noun}").configure(noun_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
