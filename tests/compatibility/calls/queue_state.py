"""Telling a client that a queue is paused, as its own poller does."""

from __future__ import annotations

import importlib
from typing import Any

from tests.compatibility.caller import Caller, takes
from tests.compatibility.stage import Stage


def tell_queue_state(stage: Stage, call: Caller, client: Any) -> None:
    home = "tinsmith.client.waits" if stage.is_tinsmith else "tinker.lib.api_future_impl"
    paused = importlib.import_module(home).QueueState.PAUSED_CAPACITY
    method = call.of(client)
    # SDK 0.3 knows no reasons.
    reason = ["for a test"] if takes(method, "queue_state_reason") else []
    assert method(paused, *reason) is None
