"""`tinsmith serve`: run the service, or check its settings.

Each setting of `service/run/options.py` is a flag here. `service/run/` loads the settings and runs
the service.
"""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser
from tinsmith.service.run.options import BY_NAME, CONFIG_VARIABLE, OPTIONS, Option

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.service.run.settings_loading import LoadedSettings

EPILOG = f"""\
A flag takes precedence over the environment variable of the setting, and that over the --config
file. For example, --log-level is TINSMITH_SERVE_LOG_LEVEL in the environment, and `level` in the
section [log] of the file. {CONFIG_VARIABLE} can name the file too.

example: tinsmith serve --model my-model=./path/to/model --port 8001
"""


def configure(parser: Parser) -> None:
    """Add a flag for each setting."""
    parser.set_defaults(run=run)
    parser.epilog = EPILOG
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the settings and the source of each, then exit",
    )
    add_settings(parser, OPTIONS)


def add_settings(parser: Parser, options: tuple[Option, ...]) -> None:
    """Add flags for these settings, and `--config`."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for option in options:
        # Values are checked when loaded, like those of the file and the environment.
        kwargs: dict[str, Any] = {"dest": _destination(option), "default": None}
        kwargs["help"] = f"{option.help} (default: {option.default})".replace("%", "%%")
        if not option.value:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["metavar"] = option.value
            kwargs["action"] = "append" if option.is_list else "store"
            kwargs["choices"] = option.choices or None
        group.add_argument(option.flag, **kwargs)


def loaded_settings(arguments: argparse.Namespace) -> LoadedSettings:
    """The settings of a command line whose parser has the flags of `add_settings`.

    Raises:
        UsageError: A setting is invalid.
    """
    from tinsmith.cli.command_errors import UsageError
    from tinsmith.errors import ValidationError
    from tinsmith.service.run.settings_loading import load_settings

    flags = {option.name: getattr(arguments, _destination(option), None) for option in OPTIONS}
    try:
        return load_settings(flags, config=arguments.config)
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc


def names_database(arguments: argparse.Namespace) -> bool:
    """Whether a flag of `add_settings` says where the service's database is."""
    flags = ("data", "database")
    given = [getattr(arguments, _destination(BY_NAME[name]), None) for name in flags]
    return any(one is not None for one in (*given, arguments.config))


def run(arguments: argparse.Namespace) -> int | None:
    """Run the service until it is stopped; with `--check`, print the settings instead."""
    from tinsmith.cli.command_errors import UsageError
    from tinsmith.errors import ValidationError
    from tinsmith.service.run.settings_loading import as_toml, check_start

    loaded = loaded_settings(arguments)
    try:
        check_start(loaded.settings)
    except ValidationError as exc:
        raise UsageError(str(exc.args[0]), remedy=exc.remedy) from exc
    if not arguments.check:
        return _serve(loaded)
    from tinsmith.cli.output import show
    from tinsmith.service.run.service_settings import flat_settings

    flat = flat_settings(loaded.settings, is_masked=True)
    show(
        arguments.format,
        {name: {"value": value, "source": loaded.sources[name]} for name, value in flat.items()},
        as_toml(loaded).rstrip(),
    )
    return None


def _serve(loaded: LoadedSettings) -> int:
    from tinsmith.cli.command_errors import CommandError

    try:
        from tinsmith.service.run.lifecycle import serve
    except ModuleNotFoundError as exc:
        raise CommandError(
            f"the service requires {exc.name}, which is not installed",
            remedy="pip install 'tinsmith[server]'",
        ) from exc
    return serve(loaded.settings)


def _destination(option: Option) -> str:
    return f"setting_{option.name}"
