"""How far a long piece of work has come, for a person at a terminal or for a function.

Nothing is shown where the output is neither a terminal nor a notebook's cell. Knows nothing of what
the work is.
"""

from __future__ import annotations

from collections.abc import Callable

from tinsmith.observe import progress as observe

Progress = bool | Callable[[int, int | None], object] | None
"""True for a bar on a terminal or in a notebook, a function that is called with how many are done
and how many there are (None if that is not known), or None for nothing."""


class ProgressTeller:
    """Tells whoever wants to know; in a `with` block."""

    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._tell = progress if callable(progress) else None
        self._bar: observe.Progress | None = None
        if progress and self._tell is None:
            self._bar = observe.Progress(what, total, is_left=True)

    def one_more(self) -> None:
        """Another one is done."""
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)
        if self._bar is not None:
            self._bar.add(1)

    def __enter__(self) -> ProgressTeller:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.hide()
