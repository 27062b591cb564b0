from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith import errors as e

# Names, parents and statuses that programs written for the official SDK catch.
OFFICIAL: dict[str, tuple[type[BaseException], int | None]] = {
    "TinkerError": (Exception, None),
    "APIError": (e.TinkerError, None),
    "APIResponseValidationError": (e.APIError, None),
    "APIStatusError": (e.APIError, None),
    "APIConnectionError": (e.APIError, None),
    "APITimeoutError": (e.APIConnectionError, None),
    "BadRequestError": (e.APIStatusError, 400),
    "AuthenticationError": (e.APIStatusError, 401),
    "BillingError": (e.APIStatusError, 402),
    "PermissionDeniedError": (e.APIStatusError, 403),
    "NotFoundError": (e.APIStatusError, 404),
    "ConflictError": (e.APIStatusError, 409),
    "UnprocessableEntityError": (e.APIStatusError, 422),
    "RateLimitError": (e.APIStatusError, 429),
    "InternalServerError": (e.APIStatusError, 500),
    "RequestFailedError": (e.TinkerError, None),
}
CLASSES = [
    value
    for value in vars(e).values()
    if inspect.isclass(value) and issubclass(value, e.TinkerError)
]
RESPONSE = SimpleNamespace(status_code=418, request=SimpleNamespace(method="GET"))


def made(cls: type[e.TinkerError]) -> e.TinkerError:
    """An error of the class with everything that it can carry."""
    known: dict[str, Any] = {
        "response": RESPONSE,
        "body": {"detail": "no"},
        "retry_after_s": 1.5,
        "request_id": "r-1",
        "remedy": "try later",
        "category": e.RequestErrorCategory.User,
        "request": SimpleNamespace(method="POST"),
    }
    parameters = inspect.signature(cls.__init__).parameters
    given = {name: value for name, value in known.items() if name in parameters}
    make: Any = cls
    if "message" in parameters:
        return cast(e.TinkerError, make(message="it broke", **given))
    return cast(e.TinkerError, make("it broke", **given))


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_names_have_their_official_parents(name: str) -> None:
    cls = getattr(e, name)

    parent, _ = OFFICIAL[name]

    assert cls.__bases__[0] is parent
    assert all(not issubclass(base, e.TinkerError) for base in cls.__bases__[1:])


@pytest.mark.parametrize("name", [name for name, (_, status) in OFFICIAL.items() if status])
def test_a_status_error_knows_its_status(name: str) -> None:
    error = getattr(e, name)("it broke")

    assert error.status_code == OFFICIAL[name][1]


def test_a_given_status_wins_over_that_of_the_response_and_of_the_class() -> None:
    assert e.InternalServerError("x", response=RESPONSE).status_code == 418
    assert e.InternalServerError("x", response=RESPONSE, status_code=503).status_code == 503


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling_with_all_its_fields(cls: type[e.TinkerError]) -> None:
    error = made(cls)
    error.add_note("seen in step 7")

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))

        assert type(again) is cls
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_can_be_copied(cls: type[e.TinkerError]) -> None:
    error = made(cls)

    again = copy.deepcopy(copy.copy(error))

    assert type(again) is cls
    assert vars(again) == vars(error)


def test_a_timeout_error_without_arguments_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(e.APITimeoutError()))

    assert type(error) is e.APITimeoutError
    assert error.message == str(error) == "Request timed out."
    assert error.body is None


def test_a_subclass_with_its_own_arguments_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StepError(7, loss=2.5)))

    assert (error.step, error.loss, str(error)) == (7, 2.5, "step 7 failed")


class StepError(e.TinkerError):
    def __init__(self, step: int, *, loss: float) -> None:
        super().__init__(f"step {step} failed")
        self.step = step
        self.loss = loss


@pytest.mark.parametrize("cls", CLASSES)
def test_the_remedy_is_part_of_the_message(cls: type[e.TinkerError]) -> None:
    error = made(cls)

    assert str(error) == "it broke; try later"
    assert error.remedy == "try later"
    assert error.request_id == "r-1"


def test_an_error_without_a_remedy_shows_only_its_message() -> None:
    assert str(e.BadRequestError("it broke")) == "it broke"
    assert e.BadRequestError("it broke").request_id is None


def test_an_api_error_keeps_message_request_and_body() -> None:
    error = e.APIStatusError("it broke", response=RESPONSE, body={"detail": "no"})

    assert error.message == "it broke"
    assert error.request is RESPONSE.request
    assert error.response is RESPONSE
    assert error.body == {"detail": "no"}
    assert error.retry_after_s is None


def test_a_failed_request_keeps_its_category() -> None:
    error = e.RequestFailedError("it broke", "r-1", e.RequestErrorCategory.User)

    assert (error.message, error.request_id) == ("it broke", "r-1")
    assert error.category is e.RequestErrorCategory.User
    assert e.RequestFailedError("x").category is e.RequestErrorCategory.Unknown


def test_a_connection_error_has_a_default_message() -> None:
    error = e.APIConnectionError()

    assert str(error) == "Connection error."
    assert error.body is None


def test_a_response_validation_error_keeps_its_status() -> None:
    error = e.APIResponseValidationError(RESPONSE, "<html>")

    assert error.status_code == 418
    assert error.body == "<html>"
    assert e.APIResponseValidationError().status_code is None


def test_validation_errors_are_value_errors_too() -> None:
    """Programs catch `(TinkerError, ValueError)` around everything that reads."""
    assert issubclass(e.ValidationError, ValueError)
    assert issubclass(e.DecodeError, ValueError)
    assert issubclass(e.UnknownFieldError, TypeError)
    assert issubclass(e.BodyTooLargeError, e.DecodeError)


def test_api_timeout_errors_are_timeout_errors_too() -> None:
    """Programs catch `asyncio.TimeoutError`, as the official SDK has them do."""
    error = e.APITimeoutError("it was slow", request_id="r-1", remedy="wait longer")

    assert isinstance(error, asyncio.TimeoutError)
    assert isinstance(error, TimeoutError)
    assert (str(error), error.args) == ("it was slow; wait longer", ("it was slow",))
    assert not issubclass(e.CertificateError, TimeoutError)


def test_tinsmith_error_is_an_alias_of_the_root_error() -> None:
    assert e.TinsmithError is e.TinkerError


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("user", "User"),
        ("USER", "User"),
        (" Server ", "Server"),
        ("unknown", "Unknown"),
        ("martian", "Unknown"),
        ("", "Unknown"),
        (None, "Unknown"),
        (5, "Unknown"),
        (["user"], "Unknown"),
    ],
)
def test_a_category_is_parsed_case_insensitively_and_never_raises(
    text: object, category: str
) -> None:
    assert e.RequestErrorCategory.parse(text) is e.RequestErrorCategory[category]


def test_a_value_is_shown_briefly_and_never_raises() -> None:
    deep: list[object] = []
    for _ in range(5_000):
        deep = [deep]

    assert e.shown("ab") == "'ab'"
    assert len(e.shown("a" * 1000)) == 80
    assert e.shown("a" * 1000, most=10) == "'aaaaaaaaa"
    assert e.shown(deep) == "<list that cannot be printed>"
    assert e.shown(10**5000) == "<int that cannot be printed>"


STATUS_CLASSES = [cls for cls in CLASSES if issubclass(cls, e.APIStatusError)]


@pytest.mark.parametrize("cls", STATUS_CLASSES)
def test_a_rejected_result_keeps_its_error_class_and_is_a_value_error(
    cls: type[e.APIStatusError],
) -> None:
    error = cls("it broke", body={"detail": "no"}, status_code=422, request_id="r-1")
    error.add_note("seen in step 7")

    refused = e.refused_result(error)

    assert isinstance(refused, cls)
    assert isinstance(refused, e.ResultRefusedError)
    assert isinstance(refused, ValueError)
    assert vars(refused) == vars(error)
    again = pickle.loads(pickle.dumps(refused))
    assert type(again) is type(refused)
    assert (str(again), vars(again)) == (str(refused), vars(refused))
    assert type(copy.copy(refused)) is type(refused)


def test_an_expired_result_has_its_own_error_class() -> None:
    gone = e.refused_result(e.APIStatusError("it is gone", status_code=410))

    assert type(gone) is e.ResultExpiredError
    assert e.ResultExpiredError("by hand").status_code == 410


def test_a_server_error_is_not_a_rejected_result() -> None:
    failing = e.InternalServerError("it broke", status_code=503)

    assert e.refused_result(failing) is failing
