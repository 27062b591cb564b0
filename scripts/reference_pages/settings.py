"""The page of the settings of `tinsmith serve`, and of the quotas of tenants."""

from __future__ import annotations

from scripts.reference_pages.markdown import code, table
from tinsmith.serve.options import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, OPTIONS, Option
from tinsmith.server.keys import QUOTAS

HEAD = ("key in a file", "flag", "variable", "default", "what it is")
INTRODUCTION = f"""\
# Settings of the service

What `tinsmith serve` can be told; [serving](../serving.md#settings) says which of the places
counts. A file in TOML is named by `--config` or `{CONFIG_VARIABLE}`; in it, what is before a
dot is a section: `body_bytes` below `[limits]`. A variable's name begins with
`{ENVIRONMENT_PREFIX}`, which the table leaves out.
"""
QUOTAS_INTRODUCTION = """\
## Quotas

What one tenant can be held to, with `tinsmith key create --quota NAME=N` or
`tinsmith key quota TENANT NAME=N`:
"""


def page() -> str:
    """The whole page."""
    quotas = ((code(name), what) for name, what in QUOTAS.items())
    parts = [
        INTRODUCTION.rstrip(),
        table(HEAD, map(_row, OPTIONS)),
        QUOTAS_INTRODUCTION.rstrip(),
        table(("quota", "of one tenant"), quotas),
    ]
    return "\n\n".join(parts) + "\n"


def _row(option: Option) -> tuple[str, ...]:
    default = option.default if " " in option.default else code(option.default)
    flag = f"{option.flag} {option.value}" if option.value else option.flag
    shown = f"{code(flag)}, {code(f'--no-{option.flag[2:]}')}" if not option.value else code(flag)
    choices = f": {', '.join(map(code, option.choices))}" if option.choices else ""
    variable = option.variable.removeprefix(ENVIRONMENT_PREFIX)
    return code(option.name), shown, code(variable), default, option.help + choices
