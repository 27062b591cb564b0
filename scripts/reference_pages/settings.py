"""The reference of the settings of `tinsmith serve` and of quotas."""

from __future__ import annotations

from scripts.reference_pages.markdown import code, table
from tinsmith.service.api.keys import QUOTAS
from tinsmith.service.run.options import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, OPTIONS, Option

HEAD = ("key in a file", "flag", "variable", "default", "meaning")
INTRODUCTION = f"""\
# Settings of the service

For operators who look up a setting of `tinsmith serve`. For example, these three are the same:

```text
--limits-body-bytes 1000000
{ENVIRONMENT_PREFIX}LIMITS_BODY_BYTES=1000000
body_bytes = 1000000    under [limits] in the file that --config or {CONFIG_VARIABLE} names
```

[Running a service](../serving.md#settings) says which one wins. The table omits the prefix
`{ENVIRONMENT_PREFIX}` of variables.
"""
QUOTAS_INTRODUCTION = """\
## Quotas

Limits for one tenant, set with `tinsmith key create --quota NAME=N` or
`tinsmith key quota TENANT NAME=N`:
"""


def page() -> str:
    """The whole page."""
    quotas = ((code(name), what) for name, what in QUOTAS.items())
    parts = [
        INTRODUCTION.rstrip(),
        table(HEAD, map(_row, OPTIONS)),
        QUOTAS_INTRODUCTION.rstrip(),
        table(("quota", "meaning, per tenant"), quotas),
    ]
    return "\n\n".join(parts) + "\n"


def _row(option: Option) -> tuple[str, ...]:
    default = option.default if " " in option.default else code(option.default)
    flag = f"{option.flag} {option.value}" if option.value else option.flag
    shown = f"{code(flag)}, {code(f'--no-{option.flag[2:]}')}" if not option.value else code(flag)
    choices = f": {', '.join(map(code, option.choices))}" if option.choices else ""
    variable = option.variable.removeprefix(ENVIRONMENT_PREFIX)
    return code(option.name), shown, code(variable), default, option.help + choices
