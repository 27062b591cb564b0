"""`tinsmith model`: what can be trained and sampled, and base models on this machine.

`list` asks a service, as the official command does. `pull`, `local` and `remove` are about the
files that a service on this machine loads, and need none; they are in `local_models.py`.
"""

from __future__ import annotations

import argparse

from tinsmith.cli import local_models
from tinsmith.cli.parser import Parser
from tinsmith.cli.text import MISSING, counted, yes_or_no

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    from typing import Any

    from tinsmith.types.service import SupportedModel


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith model`."""
    listing = parser.add_verb("list", "list the models that you can use", list_models)
    listing.add_argument("substring", nargs="?", help="only those with this in their name")
    local_models.configure(parser)


def list_models(arguments: argparse.Namespace) -> None:
    """Show the models whose names have the substring, in any case."""
    from tinsmith.cli.connect import check_record, limit_s, service_client
    from tinsmith.cli.failures import CommandError
    from tinsmith.cli.output import Table, show

    check_record(arguments)
    with service_client(arguments) as client:
        models: list[SupportedModel] = client.get_server_capabilities(
            timeout=limit_s(arguments)
        ).supported_models
    wanted = (arguments.substring or "").lower()
    found = [model for model in models if wanted in (model.model_name or "").lower()]
    if wanted and not found:
        raise CommandError(
            f"no model has {arguments.substring!r} in its name",
            remedy="`tinsmith model list` shows all that you can use",
        )
    columns = ["Model", "Max Context", "Trainable", "Sampleable"]
    has_aliases = any(model.alias_of for model in found)
    show(
        arguments.format,
        {"models": [_plain(model, has_aliases) for model in found]},
        Table(
            counted(len(found), "model") if found else "No models found",
            [*columns, "Alias Of"] if has_aliases else columns,
            [_row(model, has_aliases) for model in found],
        ),
    )


def _plain(model: SupportedModel, has_aliases: bool) -> Any:
    from tinsmith.cli.output import plain_of

    plain = plain_of(model)
    if not has_aliases:
        del plain["alias_of"]  # only services of ours know of them
    return plain


def _row(model: SupportedModel, has_aliases: bool) -> list[str]:
    context = model.max_context_length
    row = [
        model.model_name or MISSING,
        MISSING if context is None else str(context),
        yes_or_no(model.trainable),
        yes_or_no(model.sampleable),
    ]
    return [*row, model.alias_of or ""] if has_aliases else row
