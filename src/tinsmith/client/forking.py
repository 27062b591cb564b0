"""What a child made by `fork` must begin anew: it has its parent's memory and none of its threads.

A lock that another thread held at that moment is never released in the child, and an event loop
that ran there is run by nobody. Each module that keeps such things for the whole process says here
how to begin anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(begin_anew: Callable[[], None]) -> None:
    """Have something called in every child that this process forks, before anything else runs."""
    if hasattr(os, "register_at_fork"):  # there is no fork on Windows
        os.register_at_fork(after_in_child=begin_anew)
