"""Writes `docs/compatibility.md` from what was measured."""

from __future__ import annotations

from pathlib import Path

from tests.compatibility.calls.table import CALLS
from tests.compatibility.known import KNOWN, explained
from tests.compatibility.outcomes import Outcome, Run
from tests.compatibility.surface import CLIENTS

PATH = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

TYPES = "top-level types"
SECTIONS = (*CLIENTS, "auth", TYPES)
OK, FAILED, ABSENT = "✓", "✗", "–"

HEAD = """\
# Compatibility

The official SDK, unmodified, calls the service by every public method that it has. Each release
runs in a process of its own against one running service, `tinsmith serve --engine fake` with a key;
what each call gives back is checked. `tinsmith` is our own client, `as tinker` the same under the
official name. This page is written by the measurement, and a test fails when it no longer holds.

| mark | means |
|---|---|
| ✓ | the call succeeded, and gave what it should |
| ✓✓ | both did: the blocking method, and its twin for coroutines (`…_async`) |
| ✓– | this release has one of the two |
| – | this release has no such method |
| a number | fails, for the reason below |

"""

FOOT = """\
## Measured again

    scripts/compatibility            # calls everything, and compares with this page
    scripts/compatibility --write    # rewrites this page

The releases and the SHA-256 of their wheels are in `tests/compatibility/releases.toml`, the calls
in `tests/compatibility/calls/`. Methods are found by looking at each release: one that has no call
there is a failure.
"""


def rendered(runs: list[Run]) -> str:
    """The whole page."""
    return f"{HEAD}{_table(runs)}\n{_reasons()}\n{FOOT}"


def is_current(text: str) -> bool:
    return PATH.exists() and PATH.read_text(encoding="utf-8") == text


def _table(runs: list[Run]) -> str:
    titles = [run.title for run in runs]
    lines = [f"| | {' | '.join(titles)} |", f"|---|{':-:|' * len(titles)}"]
    for section in SECTIONS:
        lines.append(f"| **{section}** |{' |' * len(titles)}")
        lines += [_row(method, runs) for method in _methods(section, runs)]
    return "\n".join(lines) + "\n"


def _row(method: str, runs: list[Run]) -> str:
    has_twin = any(len(run.of(method)) > 1 for run in runs)
    cells = [_cell(run, run.of(method), has_twin) for run in runs]
    name = method if _section(method) == TYPES else method.partition(".")[2]
    return f"| `{name}` | {' | '.join(cells)} |"


def _methods(section: str, runs: list[Run]) -> list[str]:
    """In the order of the calls; what has no call comes last."""
    found = {outcome.method for run in runs for outcome in run.outcomes}
    known = list(CALLS)
    ordered = sorted(found, key=lambda m: (known.index(m) if m in CALLS else len(known), m))
    return [method for method in ordered if _section(method) == section]


def _section(method: str) -> str:
    kind = method.partition(".")[0]
    return kind if kind in SECTIONS else TYPES


def _cell(run: Run, outcomes: list[Outcome], has_twin: bool) -> str:
    if not outcomes:
        return ABSENT
    marks = {outcome.is_coroutine: _mark(run.title, outcome) for outcome in outcomes}
    if not has_twin:
        return "".join(marks.values())
    return marks.get(False, ABSENT) + marks.get(True, ABSENT)


def _mark(title: str, outcome: Outcome) -> str:
    known = explained(title, outcome)
    if known is not None:
        return str(KNOWN.index(known) + 1)
    return OK if outcome.error is None else FAILED


def _reasons() -> str:
    lines = [
        f"{number}. `{known.name}`: {known.why}" for number, known in enumerate(KNOWN, start=1)
    ]
    return "\n".join(lines) + "\n"
