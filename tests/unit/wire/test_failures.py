from __future__ import annotations

import pickle
from typing import Any

import pytest

from tinsmith import errors as e
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire import json_format
from tinsmith.wire.failures import (
    error_from_failed,
    error_from_reply,
    failed_from_error,
    is_retried,
    reply_from_error,
    status_class,
    status_of,
)

STATUSES = {
    400: e.BadRequestError,
    401: e.AuthenticationError,
    402: e.BillingError,
    403: e.PermissionDeniedError,
    404: e.NotFoundError,
    409: e.ConflictError,
    422: e.UnprocessableEntityError,
    429: e.RateLimitError,
    500: e.InternalServerError,
    503: e.InternalServerError,
    599: e.InternalServerError,
    408: e.APIStatusError,
    410: e.APIStatusError,
    418: e.APIStatusError,
}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (e.CheckpointNotFoundError("tinker://r/weights/c is not there"), 404),
        (e.CheckpointExistsError("it is there"), 400),
        (e.CheckpointFormatError("no adapter"), 422),
        (e.CheckpointUnavailableError("/srv/secret cannot be read"), 503),
        (e.StorageFullError("/srv/secret is full"), 503),
        (e.CheckpointDamagedError("/srv/secret/file differs"), 500),
    ],
)
def test_errors_of_saved_weights_have_a_status_and_tell_no_folder(
    error: e.CheckpointError, status: int
) -> None:
    reply = reply_from_error(error)

    assert reply.status == status
    assert b"/srv" not in b"".join(reply.parts)
    assert "/srv" not in failed_from_error(error).error
    assert ("retry-after-ms" in {name.lower() for name in reply.headers}) is (status == 503)


# A refusal, as the client sees it


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_becomes_the_error_that_programs_catch(status: int) -> None:
    error = error_from_reply(status, {}, b'{"detail": "no"}', request_id="r-1")

    assert type(error) is status_class(status) is STATUSES[status]
    assert error.status_code == status
    assert error.request_id == "r-1"
    assert str(error) == f"Error code: {status} - no"
    assert error.body == {"detail": "no"}


@pytest.mark.parametrize(
    ("body", "message", "held"),
    [
        (b'{"detail": "no"}', "Error code: 400 - no", {"detail": "no"}),
        (b'{"error": "no"}', "Error code: 400 - no", {"error": "no"}),
        (b'{"detail": [1]}', "Error code: 400 - {'detail': [1]}", {"detail": [1]}),
        (b"[1]", "Error code: 400 - [1]", [1]),
        (b'"no"', "Error code: 400 - 'no'", "no"),
        (b"null", "Error code: 400 - None", None),
        (b"<html>no</html>", "<html>no</html>", "<html>no</html>"),
        (b"", "Error code: 400", ""),
        (b"\xff\xfe", "\ufffd\ufffd", "\ufffd\ufffd"),
    ],
)
def test_a_message_shows_the_body_as_json_as_text_or_not_at_all(
    body: bytes, message: str, held: object
) -> None:
    for form in (body, memoryview(body)):
        error = error_from_reply(400, {}, form)

        assert str(error) == message
        assert error.body == held


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("https://h.example/api/v1/x?signature=secret", "'https://h.example'"),
        ("https://me:secret@h.example:8443/api", "'https://h.example:8443'"),
        ("/api/v2/x?signature=secret", "'another path'"),
    ],
)
def test_a_service_that_sends_us_elsewhere_is_named_without_what_may_be_a_secret(
    address: str, told: str
) -> None:
    error = error_from_reply(307, {"Location": address}, b"")

    assert str(error) == (
        f"Error code: 307; the service sends us to {told}: see that the base URL is its address"
    )
    assert error.status_code == 307


def test_an_address_elsewhere_that_is_none_is_not_told() -> None:
    assert str(error_from_reply(307, {"location": "https://[h"}, b"")) == "Error code: 307"
    assert str(error_from_reply(400, {"location": "https://h"}, b"")) == "Error code: 400"


def test_when_to_come_back_is_kept() -> None:
    assert error_from_reply(429, {"retry-after": "7"}, b"{}").retry_after_s == 7
    assert error_from_reply(429, {"retry-after-ms": "250"}, b"{}").retry_after_s == 0.25
    assert error_from_reply(429, {"retry-after": "soon"}, b"{}").retry_after_s is None


def test_an_error_keeps_the_reply_and_can_be_pickled() -> None:
    error = error_from_reply(429, {"x-request-id": "a"}, b'{"detail": "no"}')

    again = pickle.loads(pickle.dumps(error))

    assert again.response.status_code == 429
    assert again.response.headers == {"x-request-id": "a"}
    assert repr(again.response) == "FailedReply(429)"
    assert again.body == error.body


def test_what_is_shown_of_a_huge_body_is_bounded() -> None:
    text = error_from_reply(500, {}, b"x" * 10_000_000)
    listed = error_from_reply(500, {}, b'["' + b"x" * 500_000 + b'"]')

    assert len(str(text)) <= 64 * 1024
    assert len(str(listed)) <= 65 * 1024


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_clients_try_again_after(status: int) -> None:
    assert is_retried(status)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 410, 413, 422])
def test_clients_give_up_after(status: int) -> None:
    assert not is_retried(status)


# An error, as the server answers it


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (e.BadRequestError("x"), 400),
        (e.NotFoundError("x"), 404),
        (e.RateLimitError("x"), 429),
        (e.APIStatusError("x", status_code=410), 410),
        (e.DecodeError("x"), 400),
        (e.BodyTooLargeError("x"), 413),
        (e.ValidationError("x"), 422),
        (e.UnknownFieldError("x"), 422),
        (e.TinkerError("x"), 500),
        (e.RequestFailedError("x"), 500),
        (RuntimeError("x"), 500),
        (ValueError("x"), 500),
        (KeyboardInterrupt(), 500),
    ],
)
def test_an_error_has_a_status(error: BaseException, status: int) -> None:
    assert status_of(error) == status
    assert reply_from_error(error).status == status


def test_a_refusal_comes_back_as_it_was_raised() -> None:
    raised = e.RateLimitError("too many samples", remedy="send fewer", retry_after_s=1.5)

    reply = reply_from_error(raised)

    headers = {name.lower(): value for name, value in reply.headers.items()}
    error = error_from_reply(reply.status, headers, b"".join(reply.parts))
    assert type(error) is e.RateLimitError
    assert error.retry_after_s == 1.5
    assert error.body == {"detail": "too many samples; send fewer"}


@pytest.mark.parametrize("error", [e.BadRequestError(""), e.ValidationError(), Exception("")])
def test_a_refusal_is_never_empty(error: Exception) -> None:
    """Clients take an empty 400 for a broken connection, and try again."""
    reply = reply_from_error(error)

    body = b"".join(reply.parts)
    assert json_format.decode_any(body)["detail"]
    assert reply.headers["Content-Length"] == str(len(body))


def test_what_is_not_ours_tells_nothing_of_the_inside() -> None:
    error = RuntimeError("password is hunter2")

    assert b"hunter2" not in b"".join(reply_from_error(error).parts)
    assert "hunter2" not in failed_from_error(error).error


def test_damaged_weights_are_told_as_such_and_not_where_they_are() -> None:
    """To try again, as with a store that is away, would not help."""
    told = failed_from_error(e.CheckpointDamagedError("/srv/secret/adapter has 3 bytes")).error

    assert "damaged" in told
    assert "/srv" not in told


@pytest.mark.parametrize(
    "kind",
    [
        e.BaseModelFormatError,
        e.BaseModelUnavailableError,
        e.CheckpointUnavailableError,
        e.LedgerDamagedError,
        e.LedgerUnavailableError,
        e.LedgerVersionError,
        e.StorageFullError,
    ],
)
def test_what_is_wrong_on_the_servers_disk_is_told_without_its_folders(
    kind: type[e.TinkerError],
) -> None:
    error = kind("/srv/secret/file cannot be read")

    assert b"/srv" not in b"".join(reply_from_error(error).parts)
    assert "/srv" not in failed_from_error(error).error


def test_text_that_no_encoding_holds_does_not_stop_an_answer() -> None:
    for error in (e.BadRequestError("no model \ud800"), e.RequestFailedError("no model \ud800")):
        reply = reply_from_error(error)
        failed = json_format.encode(failed_from_error(error))

        assert json_format.decode_any(b"".join(reply.parts))["detail"] == "no model ?"
        assert json_format.decode_any(failed)["error"] == "no model ?"


# A failed operation


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (e.ValidationError("x"), "user"),
        (e.BadRequestError("x"), "user"),
        (e.InternalServerError("x"), "server"),
        (e.TinkerError("x"), "server"),
        (RuntimeError("x"), "server"),
        (e.RequestFailedError("x", category=e.RequestErrorCategory.Unknown), "unknown"),
    ],
)
def test_a_failure_says_who_can_mend_it(error: Exception, category: str) -> None:
    assert failed_from_error(error).category is e.RequestErrorCategory(category)


def test_a_failure_comes_back_as_it_was_raised() -> None:
    raised = e.RequestFailedError("out of memory", "r-1", e.RequestErrorCategory.Server)
    body = json_format.encode(failed_from_error(raised))

    error = error_from_failed(json_format.decode_any(body), "r-1")

    assert (error.message, error.request_id, error.category) == (
        "out of memory",
        "r-1",
        e.RequestErrorCategory.Server,
    )


@pytest.mark.parametrize(
    "plain", [{}, {"error": None}, {"error": {"message": 5}}, {"error": [], "category": {}}]
)
def test_a_failure_of_any_shape_becomes_an_error(plain: dict[str, Any]) -> None:
    error = error_from_failed(plain, "r-1")

    assert error.request_id == "r-1"
    assert error.category is e.RequestErrorCategory.Unknown


def test_a_failure_keeps_its_remedy() -> None:
    failed = failed_from_error(e.ValidationError("rank is 0", remedy="use 1 or more"))

    assert failed == RequestFailedResponse(
        error="rank is 0; use 1 or more", category=e.RequestErrorCategory.User
    )


def test_headers_of_a_refusal_are_found_in_any_case_and_hold_no_cookies() -> None:
    error = error_from_reply(429, {"Retry-After": "3", "Set-Cookie": "id=secret"}, b"")

    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert copy.response.headers["RETRY-AFTER"] == copy.response.headers.get("retry-after")
        assert "Retry-after" in copy.response.headers
        assert "set-cookie" not in copy.response.headers
        assert copy.response.headers.get("missing", "none") == "none"
