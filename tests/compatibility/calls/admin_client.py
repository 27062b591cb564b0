"""How each public method of `AdminClient` is called; the functions have the methods' names."""

from __future__ import annotations

import datetime
from typing import Any

from tests.compatibility.caller import Caller
from tests.compatibility.calls.service_client import check_telemetry
from tests.compatibility.stage import Stage, settled

HOUR = datetime.timedelta(hours=1)


def get_audit_log(stage: Stage, call: Caller) -> None:
    check_audit_log(stage, call, stage.admin)


def check_audit_log(stage: Stage, call: Caller, client: Any) -> None:
    path = stage.new_state()
    before = datetime.datetime.now(datetime.UTC).date()

    entries = call(client, "checkpoints", before).entries

    if datetime.datetime.now(datetime.UTC).date() == before:  # else midnight came between
        assert path in [entry.tinker_path for entry in entries]


def get_billing_usage(stage: Stage, call: Caller) -> None:
    check_billing_usage(stage, call, stage.admin)


def check_billing_usage(stage: Stage, call: Caller, client: Any) -> None:
    settled(stage.trainer.forward_backward(stage.data, "cross_entropy"))
    hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)

    usage = call(client, hour - HOUR, hour + 2 * HOUR)

    kinds = {event.event_info.type for event in usage.data}
    assert "training" in kinds


def get_current_checkpoint_storage_usage(stage: Stage, call: Caller) -> None:
    check_storage_usage(stage, call, stage.admin)


def check_storage_usage(stage: Stage, call: Caller, client: Any) -> None:
    stage.state  # noqa: B018 - so that something is stored

    items = call(client).data

    assert sum(item.checkpoint_count for item in items) >= 1
    assert sum(item.size_bytes for item in items) > 0


def get_telemetry(stage: Stage, call: Caller) -> None:
    check_telemetry(stage, call(stage.admin))


# Of our client alone


def holder(stage: Stage, call: Caller) -> None:
    assert call(stage.admin) is not None
