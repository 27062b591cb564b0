"""Renders `docs/compatibility.md` from the measured outcomes."""

from __future__ import annotations

import textwrap
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

For users of the official SDK: which methods of which releases work against the service. The table
is measured, and a test fails when it no longer holds.

To measure again, in a clone:

```sh
scripts/compatibility            # call everything, and compare with this page
scripts/compatibility --write    # rewrite this page
scripts/compatibility --newest   # has a new release something that is not in the table?
```

Each release of the official SDK, unmodified, calls every public method that it has, in a process of
its own, against a running service with a key; the results are checked. `tinsmith` is our own
client, and `as tinker` is the same client under the official name.

| mark | meaning |
|---|---|
| ✓ | the call succeeded with the right result |
| ✓✓ | so did its `…_async` variant |
| ✓– | this release has one of the two |
| – | this release has no such method |
| a number | the call fails, for the reason below the table |

"""

FOOT = """\
## One spelling for threads and coroutines

Since 0.38, the documentation of the official SDK spells each call once: `await client.method(…)` in
a coroutine, `client.method(…).result()` elsewhere. Our client accepts that, and everything that
programs for 0.36 do. This section is from the documentation: no release after 0.36.0 was run.

| what | in our client |
|---|---|
| calls that return a future in 0.36 | the future can be awaited, whatever the kind of future was |
| methods that create a client | return a future of the client that is also the client |
| `APIFuture.coroutine()`, `.future()` | as documented |
| `result()` on the client's own event loop | raises `RuntimeError` instead of hanging |
| methods with `_async` | stay, without a warning |

Methods that create a client are `create_lora_training_client`, `create_training_client_from_state`,
`create_training_client_from_state_with_optimizer`, `create_sampling_client` and
`save_weights_and_get_sampling_client`. [The client](client.md#create-clients) describes what direct
use of the future does.

These methods make a request and return a plain value in 0.36. They still do, and block:

| method | in a coroutine |
|---|---|
| `ServiceClient.get_server_capabilities` | `await client.get_server_capabilities_async()` |
| `TrainingClient.get_info` | `await training.get_info_async()` |
| `TrainingClient.get_tokenizer` | `await training.get_tokenizer_async()` |
| `SamplingClient.get_base_model` | `await sampler.get_base_model_async()` |
| `SamplingClient.get_tokenizer` | `await sampler.get_tokenizer_async()` |
| `SamplingClient.get_sampler_handle` | `await asyncio.to_thread(sampler.get_sampler_handle)` |

A value cannot also be its own future: a program for 0.36 passes on what `get_info()` returns, and
compares, stores or pickles it. `create_rest_client`, `from_sampler_handle`, `get_console_url` and
`get_telemetry` make no request and return plain values too.

## The next release

```sh
scripts/compatibility --newest
```

This installs the newest `tinker` of the package index into an environment of its own, and lists the
public names, methods and parameters that it has and the newest release in the table lacks. The exit
status is 0 if there are none.

## REST calls of SDK 0.39

These are from the documentation, not run: no release of the official SDK that could be installed
here has them. Our own client calls them, and raw HTTP requests in the documented shapes. Where the
documentation is silent, this was decided:

- `external_weights_upload_start` and `external_weights_upload_finish`: the files are
  `adapter_config.json` and `adapter_model.safetensors`. The URLs are the service's own, also if its
  checkpoints are in S3. `user_metadata` is an extension.
- `search_checkpoints`: the route is `POST /api/v1/checkpoints/search`, `last_checkpoint_uuid` is
  derived from the path, and only the caller's own checkpoints are found, whatever `owner` says.
- `Checkpoint.base_model`: always set by this service.
- `user_metadata`: `save_weights_external` takes it too.
- `get_console_url`: None for a checkpoint, run or session of a tinsmith service, which has no
  console. It is recognised by the form of its ids.

## How it is measured

The releases and the SHA-256 of their wheels are in `tests/compatibility/releases.toml`, the calls
in `tests/compatibility/calls/`. Methods are found by inspecting each release; a method without a
call there is a failure.
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
    """In the order of the calls; methods without a call come last."""
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
    return "".join(
        textwrap.fill(f"{number}. `{known.name}`: {known.why}", 100, subsequent_indent="   ") + "\n"
        for number, known in enumerate(KNOWN, start=1)
    )
