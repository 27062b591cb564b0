"""`tinsmith serve`: runs the service, or checks its settings.

Each setting of `serve/options.py` is a flag here. What is set and where is `serve/loading.py`'s
matter; running is `serve/lifecycle.py`'s.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.serve.options import CONFIG_VARIABLE, OPTIONS, Option

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.serve.loading import Loaded

EPILOG = f"""\
A setting is taken from its flag, else from its variable, else from the file, else by default. The
variable of --log-level is TINSMITH_SERVE_LOG_LEVEL; in the file it is level below [log].
The file may be named by {CONFIG_VARIABLE} too.
"""


def configure(parser: Parser) -> None:
    """Add a flag for each setting."""
    parser.set_defaults(run=run)
    parser.epilog = EPILOG
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings, print them with where each comes from, and end",
    )
    add_settings(parser, OPTIONS)


def add_settings(parser: Parser, options: tuple[Option, ...]) -> None:
    """Add flags for these settings, and one for the file."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="a TOML file with settings")
    for option in options:
        # Checked when they are loaded, so that a mistake is told alike wherever it was made.
        kwargs: dict[str, Any] = {"dest": _destination(option), "default": None}
        kwargs["help"] = f"{option.help} (default: {option.default})".replace("%", "%%")
        if not option.value:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["metavar"] = option.value
            kwargs["action"] = "append" if option.is_list else "store"
            kwargs["choices"] = option.choices or None
        group.add_argument(option.flag, **kwargs)


def loaded_settings(arguments: argparse.Namespace) -> Loaded:
    """The settings of a command line that was given flags by `add_settings`.

    Raises:
        UsageError: They are wrong.
    """
    from tinsmith.cli.failures import UsageError
    from tinsmith.errors import ValidationError
    from tinsmith.serve.loading import load_settings

    flags = {option.name: getattr(arguments, _destination(option), None) for option in OPTIONS}
    try:
        return load_settings(flags, config=arguments.config)
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc


def run(arguments: argparse.Namespace) -> int | None:
    """Serve until told to end; with `--check`, print the settings instead."""
    from tinsmith.cli.failures import UsageError
    from tinsmith.errors import ValidationError
    from tinsmith.serve.loading import as_toml, check_start

    loaded = loaded_settings(arguments)
    try:
        check_start(loaded.settings)
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc
    if not arguments.check:
        return _serve(loaded)
    from tinsmith.cli.output import show
    from tinsmith.serve.settings import flat_settings

    flat = flat_settings(loaded.settings, is_masked=True)
    show(
        arguments.format,
        {name: {"value": value, "source": loaded.sources[name]} for name, value in flat.items()},
        as_toml(loaded).rstrip(),
    )
    return None


def _serve(loaded: Loaded) -> int:
    from tinsmith.cli.failures import CommandError

    try:
        from tinsmith.serve.lifecycle import serve
    except ModuleNotFoundError as exc:
        raise CommandError(
            f"the service needs {exc.name}, which is not installed",
            remedy="pip install 'tinsmith[server]'",
        ) from exc
    return serve(loaded.settings)


def _destination(option: Option) -> str:
    return f"setting_{option.name}"
