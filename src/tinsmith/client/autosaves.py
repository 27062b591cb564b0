"""What an embedded service saved of a program that was stopped, told when that program ends.

The service saves every trained model of a session whose program ended with an error or by Ctrl-C,
as `weights/autosave`. Sessions note here what they found saved; `tell` says it in one line on
stderr, after Python's traceback, with the call that goes on from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tinsmith.types.checkpoints import Checkpoint

CHECKPOINT_ID = "weights/autosave"
MOST_NAMED = 3
"""Of more models only so many are named."""


class _Noted:
    def __init__(self) -> None:
        self.saved: list[Checkpoint] = []
        self.unsaved: list[str] = []
        """Models that the service had not come to."""


_noted = _Noted()


def note_saved(checkpoints: Iterable[Checkpoint]) -> None:
    """Note the checkpoints among these that were saved by the service itself. From any thread."""
    _noted.saved += [one for one in checkpoints if one.checkpoint_id == CHECKPOINT_ID]


def note_unsaved(model_ids: Iterable[str]) -> None:
    """Note models that may be saved only after this program has ended. From any thread."""
    _noted.unsaved += model_ids


def tell() -> None:
    """Say what was noted, once."""
    saved, unsaved = _noted.saved, _noted.unsaved
    _noted.saved, _noted.unsaved = [], []
    if saved:
        _print(_saved_text(saved))
    if unsaved:
        _print(_unsaved_text(unsaved))


def tell_slow() -> None:
    """Say why the program does not end at once."""
    _print("saving what was trained; Ctrl-C again skips this")


def _saved_text(saved: list[Checkpoint]) -> str:
    first = saved[0]
    until = "" if first.expires_at is None else f", kept until {first.expires_at:%Y-%m-%d}"
    if len(saved) == 1:
        how = f'create_training_client_from_state_with_optimizer("{first.tinker_path}")'
        return f"saved {first.tinker_path}{until}; resume with {how}"
    return (
        f"saved {len(saved)} models{until}: {_named([one.tinker_path for one in saved])}; resume "
        "with create_training_client_from_state_with_optimizer(path)"
    )


def _unsaved_text(model_ids: list[str]) -> str:
    paths = [f"tinker://{model_id}/{CHECKPOINT_ID}" for model_id in model_ids]
    # Commands that only list what there is run nothing, and so save nothing.
    return f"not saved yet: {_named(paths)}; the next program that trains or samples here saves it"


def _named(paths: list[str]) -> str:
    more = len(paths) - MOST_NAMED
    return ", ".join(paths[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"tinsmith: {text}\n")
        sys.stderr.flush()
