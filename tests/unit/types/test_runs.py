from __future__ import annotations

import datetime
from typing import Any

import pytest

from tests.unit.wire import corpus
from tinsmith import types as t
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.wire import json_format

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def a_summary(status: object) -> t.SessionSummary:
    plain = {**corpus.plain_example(t.SessionSummary), "status": status}
    return json_format.decode(json_format.encode(plain), t.SessionSummary)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ({"type": "active"}, t.SessionActive),
        ({"type": "cancelled", "detail": "x"}, t.SessionCancelled),
        ({"type": "client_finished", "reason": {"type": "success"}}, t.ClientSessionFinished),
        ({"type": "client_finished", "reason": {"type": "errored"}}, t.ClientSessionFinished),
        ({"type": "client_finished", "reason": {"type": "interrupted"}}, t.ClientSessionFinished),
        (
            {
                "type": "failed",
                "category": "user",
                "message": "m",
                "reason": {"type": "training_run", "training_run_id": "r"},
            },
            t.SessionFailed,
        ),
        (
            {
                "type": "failed",
                "category": "internal",
                "message": "m",
                "reason": {"type": "sampling_session", "sampling_session_id": "s"},
            },
            t.SessionFailed,
        ),
        (
            {
                "type": "failed",
                "category": "user",
                "message": "m",
                "reason": {"type": "request", "request_id": "r", "request_type": "Sample"},
            },
            t.SessionFailed,
        ),
        (None, type(None)),
    ],
)
def test_a_status_is_decoded_by_its_type(status: Any, kind: type) -> None:
    summary = a_summary(status)

    assert type(summary.status) is kind
    if summary.status is not None:
        assert summary.status.type == status["type"]


@pytest.mark.parametrize("status", [{}, {"type": "asleep"}, {"type": None}, 5, "active"])
def test_an_unknown_status_is_rejected(status: object) -> None:
    with pytest.raises(DecodeError, match="status"):
        a_summary(status)


def test_times_may_have_any_offset() -> None:
    plain = {
        **corpus.plain_example(t.TrainingRun),
        "last_request_time": "2026-01-02T05:04:05+02:00",
    }

    run = json_format.decode(json_format.encode(plain), t.TrainingRun)

    assert run.last_request_time == NOW


def test_a_cursor_must_have_a_utc_offset() -> None:
    cursor = t.SessionSearchCursor(last_created_at=NOW, last_session_id="s")

    assert cursor.last_created_at == NOW
    with pytest.raises(ValidationError, match="timezone"):
        t.SessionSearchCursor(last_created_at=NOW.replace(tzinfo=None), last_session_id="s")


@pytest.mark.parametrize("owners", [[], [str(i) for i in range(11)]])
def test_a_search_accepts_one_to_ten_owners(owners: list[str]) -> None:
    with pytest.raises(ValidationError, match="owner_urns"):
        t.UserSearchOwner(owner_urns=owners)
    assert t.UserSearchOwner(owner_urns=["a"]).type == "user"


def test_reasons_must_be_known_and_not_empty() -> None:
    wrong: list[Any] = [[], ["bored"]]

    assert t.ClientFinishedSessionStatusQuery().reasons is None
    assert t.ClientFinishedSessionStatusQuery(reasons=["success"]).reasons == ["success"]
    for reasons in wrong:
        with pytest.raises(ValidationError, match="reasons"):
            t.ClientFinishedSessionStatusQuery(reasons=reasons)


def test_a_run_without_an_optimizer_defaults_to_adam() -> None:
    info = json_format.decode(b'{"base_model": "m", "is_lora": true}', t.WeightsInfoResponse)

    assert info.optimizer_config == t.AdamOptimizerConfig()
