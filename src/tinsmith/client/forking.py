"""Resets process-wide state in a forked child, which has its parent's memory but not its threads.

A lock that another thread held during the fork is never released in the child, and an event loop
of the parent does not run there. Each module with such state registers how to reset it.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(reset: Callable[[], None]) -> None:
    """Call `reset` in every child that this process forks, before anything else runs."""
    if hasattr(os, "register_at_fork"):  # there is no fork on Windows
        os.register_at_fork(after_in_child=reset)
