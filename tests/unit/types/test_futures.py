from __future__ import annotations

from typing import Any

import pytest

from tinsmith import types as t
from tinsmith.errors import DecodeError, RequestErrorCategory
from tinsmith.types.futures import MetadataOnlyResponse, RequestFailedResponse, TryAgainResponse
from tinsmith.wire import json_format


@pytest.mark.parametrize(
    ("plain", "text", "category"),
    [
        ({"error": "no", "category": "user"}, "no", "user"),
        ({"error": "no", "category": "USER"}, "no", "user"),
        ({"error": "no", "category": "Server"}, "no", "server"),
        ({"error": "no"}, "no", "unknown"),
        ({"error": "no", "category": "martian"}, "no", "unknown"),
        ({"error": "no", "category": None}, "no", "unknown"),
        ({"error": {"message": "no", "category": "user"}}, "no", "user"),
        ({"error": {"message": "no"}, "category": "server"}, "no", "server"),
        ({"error": {"error": "no"}}, "no", "unknown"),
        ({"error": {"detail": "no"}}, "no", "unknown"),
        ({"error": {"code": 5}}, "{'code': 5}", "unknown"),
        ({"error": None}, "None", "unknown"),
        ({}, "None", "unknown"),
        ({"error": ["a"]}, "['a']", "unknown"),
    ],
)
def test_both_forms_of_a_failure_are_decoded(
    plain: dict[str, Any], text: str, category: str
) -> None:
    failed = RequestFailedResponse.from_plain(plain)

    assert failed.error == text
    assert failed.category is RequestErrorCategory(category)


def test_the_stored_text_of_a_malformed_failure_is_bounded() -> None:
    failed = RequestFailedResponse.from_plain({"error": ["x" * 10_000_000]})

    assert len(failed.error) <= 64 * 1024


def test_a_queue_state_of_a_newer_server_is_kept() -> None:
    body = b'{"type": "try_again", "request_id": "r", "queue_state": "on_holiday"}'

    again = json_format.decode(body, TryAgainResponse)

    assert again.queue_state == "on_holiday"
    assert again.retry_after_ms is None


def test_the_size_of_a_large_result_is_decoded() -> None:
    body = b'{"status": "complete_metadata", "response_payload_size": 5}'

    assert json_format.decode(body, MetadataOnlyResponse).response_payload_size == 5


def test_completions_are_distinguished_by_their_state() -> None:
    body = (
        b'{"cursor": 7, "completions": [{"state": "failed", "request_id": "a"},'
        b'{"state": "finished", "request_id": "b", "response_payload_uncompressed_size": 5}]}'
    )

    response = json_format.decode(body, t.FuturesRetrieveResponse)

    assert response.completions == [
        t.FutureFailed(request_id="a"),
        t.FutureFinished(request_id="b", response_payload_uncompressed_size=5),
    ]
    assert [completion.state for completion in response.completions] == ["failed", "finished"]


def test_a_completion_of_unknown_state_is_rejected() -> None:
    body = b'{"cursor": 7, "completions": [{"state": "lost", "request_id": "a"}]}'

    with pytest.raises(DecodeError, match="lost"):
        json_format.decode(body, t.FuturesRetrieveResponse)
