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
    from pathlib import Path

    from tinsmith.cli.failures import CommandError
    from tinsmith.cli.output import Properties, show
    from tinsmith.model_files.workshop import NAMES, make_workshop

    folder = Path(arguments.folder)
    try:
        make_workshop(folder)
    except ModuleNotFoundError as exc:
        raise CommandError(
            f"this needs {exc.name}, which is not installed",
            remedy="pip install 'tinsmith[server]'",
        ) from exc
    variables = {"TINKER_BASE_URL": "http://127.0.0.1:8000", "TINKER_API_KEY": "tml-workshop"}
    serve = f"tinsmith serve --config {folder / 'tinsmith.toml'}"
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
