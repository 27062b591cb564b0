"""The `tinsmith` command: parses the command line and runs the module of the chosen noun.

An error that a command raises becomes a message on stderr and an exit code here, and only here.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys

from tinsmith._version import __version__
from tinsmith.cli.parser import EXIT_CODES, Parser, new_parser

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

INTERRUPTED = 130
BROKEN_PIPE = 141

# Each noun and its line in the help; its module is `tinsmith.cli.<noun>`.
NOUNS = {
    "run": "list and inspect training runs",
    "checkpoint": "list, download, publish and delete checkpoints",
    "model": "list available models; download base models",
    "session": "list sessions; export a timeline",
    "sample": "generate text with a model or a checkpoint",
    "auth": "log in and out; check your credentials",
    "billing": "show usage and storage",
    "demo": "train a small model on this machine in five minutes",
    "serve": "run the service",
    "workshop": "create a folder to run Tinker programs offline",
    "key": "create, list and revoke your service's API keys",
    "fleet": "show and drain the replicas of your service's engine",
    "completion": "print a shell completion script",
    "version": "show the versions of tinsmith and its dependencies",
}


EXAMPLES = """\
examples:
  tinsmith demo               see it work
  tinsmith serve              serve on http://127.0.0.1:8000
  tinsmith run list           list your training runs
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv` unless given, and return its exit status."""
    if arguments is None:  # called as a program, not from a test or another program
        _open_closed_streams()
        signal.signal(signal.SIGTERM, _stop)
        if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals without Unicode
            sys.stdout.reconfigure(errors="backslashreplace")
        arguments = sys.argv[1:]
    words = list(arguments)
    wants_json = _asks_for_json(words)
    try:
        return _run(words)
    except KeyboardInterrupt:
        if not wants_json:
            print(file=sys.stderr)  # after the ^C that the terminal shows
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the outermost level; `fail` raises bugs again
        from tinsmith.cli.command_errors import fail

        return fail(error, wants_json)


def root_parser() -> Parser:
    """The parser; a noun's arguments are added when it is chosen."""
    parser = new_parser(
        NOUNS,
        prog="tinsmith",
        description="The Tinker fine-tuning API on your own machines.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"tinsmith {__version__}")
    return parser


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the shell has closed (`>&-`), which Python sets to None."""
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
    sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
    return status or 0


def _show_help(parsed: Any) -> int:
    """Handle a missing verb: plain `tinsmith` prints its help, a noun alone is an error."""
    if parsed.noun is None:
        parsed.parser.print_help()
        return 0
    from tinsmith.cli.command_errors import UsageError

    raise UsageError(
        f"missing command after `tinsmith {parsed.noun}`", usage=parsed.parser.format_help() + "\n"
    )


def _asks_for_json(words: list[str]) -> bool:
    """Whether the line asks for JSON, even if it cannot be parsed."""
    pairs = itertools.pairwise([*words, ""])
    return any(
        (word in ("-f", "--format") and value == "json") or word in ("--format=json", "-fjson")
        for word, value in pairs
    )


def _stop(number: int, _: object) -> None:
    """Raise, so that the command cleans up."""
    raise SystemExit(128 + number)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit does not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
