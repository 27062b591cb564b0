"""The reference of errors: the tree, what to do about each, and HTTP statuses."""

from __future__ import annotations

from collections.abc import Iterator

import tinsmith
from scripts.reference_pages.markdown import code, paragraphs, table
from tinsmith.errors import TinkerError
from tinsmith.wire.failures import failed_from_error, is_retried, reply_from_error, status_class

STATUSES = (400, 401, 402, 403, 404, 408, 409, 410, 413, 422, 429, 500, 502, 503, 504)
RAISED_INSIDE = {"LedgerError", "CheckpointError", "ValidationError", "DecodeError"}
INTRODUCTION = """\
# Errors

For programmers who handle errors: the tree, what each error means, and what to do about it.

```py
try:
    result = training.forward_backward(data, "cross_entropy").result()
except tinsmith.RateLimitError as error:
    print(error.retry_after_s, error.request_id)
except tinsmith.TinkerError as error:
    print(error, error.remedy)
```

All errors derive from `TinkerError`, which is also named `TinsmithError`. Import them from
`tinsmith`. They carry `request_id` and `remedy` if these are known, and can be pickled. Further
base classes are in brackets.
"""
STATUSES_TEXT = """\
## Statuses

What the client raises for a status, after its retries. When a result is fetched, any 4xx is also a
`ResultRefusedError`, and 410 a `ResultExpiredError`.
"""
INSIDE_TEXT = """\
## Errors inside the service

If one of these is raised within the service while it handles a request, the client gets this
status. If it is raised while an accepted command runs, the future fails with a `RequestFailedError`
of this category. Any other error is a 500, or of the category `server`.
"""


def page() -> str:
    """The whole page."""
    found = list(_with_all_below(TinkerError))
    meant = ((code(cls.__name__), *_told(cls)) for cls in found)
    statuses = (
        (str(status), code(status_class(status).__name__), "yes" if is_retried(status) else "")
        for status in STATUSES
    )
    parts = [
        INTRODUCTION.rstrip(),
        "```text\n" + "\n".join(_tree(TinkerError)) + "\n```",
        "## What each error means",
        table(("error", "meaning", "what to do"), meant),
        STATUSES_TEXT.rstrip(),
        table(("status", "error", "retried by the client"), statuses),
        INSIDE_TEXT.rstrip(),
        table(
            ("error", "status", "Retry-After", "category"),
            (_answered(cls) for cls in found if _is_raised_inside(cls)),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def public_errors() -> set[type[TinkerError]]:
    """Every public error."""
    names = (getattr(tinsmith, name) for name in tinsmith.__all__)
    return {one for one in names if isinstance(one, type) and issubclass(one, TinkerError)}


def _children(cls: type[TinkerError]) -> list[type[TinkerError]]:
    """Direct subclasses, in order of definition."""
    public = public_errors()  # which loads them all
    return [one for one in cls.__subclasses__() if one in public and one.__bases__[0] is cls]


def _with_all_below(cls: type[TinkerError]) -> Iterator[type[TinkerError]]:
    yield cls
    for below in _children(cls):
        yield from _with_all_below(below)


def _tree(cls: type[TinkerError]) -> Iterator[str]:
    """The lines of the tree, with further base classes in brackets."""
    others = [base.__name__ for base in cls.__bases__[1:]]
    yield cls.__name__ + (f" ({', '.join(others)})" if others else "")
    children = _children(cls)
    for below in children:
        is_last = below is children[-1]
        first, *rest = _tree(below)
        yield f"{'└── ' if is_last else '├── '}{first}"
        yield from (f"{'    ' if is_last else '│   '}{line}" for line in rest)


def _told(cls: type[TinkerError]) -> tuple[str, str]:
    """Meaning and remedy: the first paragraph of the docstring, and the others."""
    first, *rest = paragraphs(cls)
    return first, " ".join(rest)


def _is_raised_inside(cls: type[TinkerError]) -> bool:
    names = {one.__name__ for one in cls.__mro__}
    return bool(names & RAISED_INSIDE)


def _answered(cls: type[TinkerError]) -> tuple[str, ...]:
    error = cls("")
    reply = reply_from_error(error)
    delay = reply.headers.get("Retry-After")
    category = failed_from_error(error).category
    return code(cls.__name__), str(reply.status), f"{delay} s" if delay else "", category.value
