"""`tinsmith workshop DIR`: a folder in which Tinker programs run with no hub."""

from __future__ import annotations

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    import argparse


def configure(parser: Parser) -> None:
    """Add the folder."""
    parser.set_defaults(run=run)
    parser.add_argument("folder", metavar="DIR", help="an empty folder, or a new one")


def run(arguments: argparse.Namespace) -> None:
    """Write the folder."""
    import shlex
    from pathlib import Path

    from tinsmith.cli.failures import require_numpy
    from tinsmith.cli.output import Properties, show
    from tinsmith.model_files.workshop import NAMES, make_workshop

    require_numpy("a workshop")
    folder = Path(arguments.folder)
    make_workshop(folder)
    variables = {"TINKER_BASE_URL": "http://127.0.0.1:8000", "TINKER_API_KEY": "tml-workshop"}
    serve = f"tinsmith serve --config {shlex.quote(str(folder / 'tinsmith.toml'))}"
    show(
        arguments.format,
        {"folder": str(folder), "models": list(NAMES), "serve": serve, "environment": variables},
        Properties(
            f"{folder} is a workshop; run programs in it",
            [
                ("Models", str(len(NAMES))),
                ("Serve with", serve),
                *((f"Set {name}", value) for name, value in variables.items()),
            ],
        ),
    )
