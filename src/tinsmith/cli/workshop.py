"""`tinsmith workshop DIR`: create a folder in which Tinker programs run offline."""

from __future__ import annotations

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    import argparse


def configure(parser: Parser) -> None:
    """Add the arguments of `tinsmith workshop`."""
    parser.set_defaults(run=run)
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder")


def run(arguments: argparse.Namespace) -> None:
    """Create the folder and print how to use it."""
    import shlex
    from pathlib import Path

    from tinsmith.cli.command_errors import require_numpy
    from tinsmith.cli.output import Properties, show
    from tinsmith.demo.workshop.folder import NAMES, make_workshop

    require_numpy("tinsmith workshop")
    folder = Path(arguments.folder)
    make_workshop(folder)
    variables = {"TINKER_BASE_URL": "http://127.0.0.1:8000", "TINKER_API_KEY": "tml-workshop"}
    serve = f"tinsmith serve --config {shlex.quote(str(folder / 'tinsmith.toml'))}"
    show(
        arguments.format,
        {"folder": str(folder), "models": list(NAMES), "serve": serve, "environment": variables},
        Properties(
            f"Created {folder}. Start the service, then run programs in this folder.",
            [
                ("Models", str(len(NAMES))),
                ("Start the service", serve),
                *((f"Set {name}", value) for name, value in variables.items()),
            ],
        ),
    )
