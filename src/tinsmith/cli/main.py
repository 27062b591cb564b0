"""The `tinsmith` command: finds the noun, hands over to its module, and tells how it ended.

What a command raises becomes a message on stderr and an exit code here, and nowhere else.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys

from tinsmith._version import __version__
from tinsmith.cli.parser import EXIT_CODES, Parser, new_parser

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

INTERRUPTED = 130
READER_LEFT = 141

# Each noun and its line in the help; the module is `tinsmith.cli.<noun>`.
NOUNS = {
    "run": "list and show training runs",
    "checkpoint": "list, show, publish, delete and download saved weights",
    "model": "list a service's models, keep base models here",
    "session": "list sessions, and export what happened in one",
    "sample": "sample from a model or a checkpoint",
    "auth": "sign in and out, and see who you are",
    "billing": "show what was used and what is stored",
    "demo": "train a real model on this machine in five minutes",
    "serve": "run the service on this machine",
    "workshop": "make a folder in which Tinker programs run with no hub",
    "key": "make, list and revoke keys of your own service",
    "completion": "print a script that completes commands in your shell",
    "version": "show the versions of tinsmith and of what it runs on",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv` unless given, and return its exit status."""
    if arguments is None:  # we are the process, and not a part of somebody else's
        _open_closed_streams()
        signal.signal(signal.SIGTERM, _stop)
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows few letters
            sys.stdout.reconfigure(errors="backslashreplace")
        arguments = sys.argv[1:]
    words = list(arguments)
    wants_json = _asks_for_json(words)
    try:
        return _run(words)
    except KeyboardInterrupt:
        if not wants_json:
            print(file=sys.stderr)  # the terminal shows ^C, and the prompt begins its own line
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return READER_LEFT
    except Exception as error:  # noqa: BLE001 - the outer edge; `told` raises what is a bug
        from tinsmith.cli.failures import told

        return told(error, wants_json)


def root_parser() -> Parser:
    """The whole parser; nouns are filled in when they are chosen."""
    parser = new_parser(
        NOUNS,
        prog="tinsmith",
        description="The Tinker fine-tuning API on your own machines.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"tinsmith {__version__}")
    return parser


def _open_closed_streams() -> None:
    """Streams that the shell has closed (`>&-`) lead nowhere; Python has none in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _run(words: list[str]) -> int:
    try:
        parsed: Any = root_parser().parse_args(words)
        if parsed.run is None:
            return _show_help(parsed)
        status: int | None = parsed.run(parsed)
    except SystemExit as ended:  # --help and --version
        status = ended.code if isinstance(ended.code, int) else 0
    sys.stdout.flush()  # so that a reader who has left is noticed here
    return status or 0


def _show_help(parsed: Any) -> int:
    """A line that ends too early: the bare command may, a noun needs one of its verbs."""
    if parsed.noun is None:
        parsed.parser.print_help()
        return 0
    from tinsmith.cli.failures import UsageError

    raise UsageError(
        f"`tinsmith {parsed.noun}` needs a command", usage=parsed.parser.format_help() + "\n"
    )


def _asks_for_json(words: list[str]) -> bool:
    """Whether JSON was asked for, also on a line that cannot be parsed."""
    pairs = itertools.pairwise([*words, ""])
    return any(
        (word in ("-f", "--format") and value == "json") or word in ("--format=json", "-fjson")
        for word, value in pairs
    )


def _stop(number: int, _: object) -> None:
    """End as after an error, so that what a command began is cleaned up."""
    raise SystemExit(128 + number)


def _forget_stdout() -> None:
    """Nobody reads on: what is still in the buffer would fail again when the interpreter exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
