"""Pages of the hosted service's console. They are the same whatever the base URL."""

from __future__ import annotations

from tinsmith.types.training import CONSOLE_URL


def session_page(session_id: str | None) -> str:
    """The page of a session; of all sessions if there is none yet."""
    return f"{CONSOLE_URL}/sessions" + ("" if session_id is None else f"/{session_id}")


def training_run_page(training_run_id: str) -> str:
    """The page of a training run."""
    return f"{CONSOLE_URL}/training_runs/{training_run_id}"
