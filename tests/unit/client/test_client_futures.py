"""The future of a client: a future and the client at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import pickle
import threading
from typing import Any
from unittest import mock

import pytest

from tinsmith.client.client_futures import ClientFuture
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease
from tinsmith.client.sampling import SamplingClient, SamplingClientFuture
from tinsmith.client.session import Session
from tinsmith.client.settings import settings_from
from tinsmith.client.training import TrainingClient, TrainingClientFuture
from tinsmith.errors import NotFoundError

FUTURE_CLASSES: list[tuple[type[ClientFuture[Any]], type]] = [
    (TrainingClientFuture, TrainingClient),
    (SamplingClientFuture, SamplingClient),
]


@pytest.fixture
def lease() -> SessionLease:
    settings = settings_from(base_url="http://127.0.0.1:9", api_key="tml-x")
    return SessionLease(Session(settings))


@pytest.fixture
def creating() -> APIFuture[TrainingClient]:
    return APIFuture("create_lora_training_client")


@pytest.mark.parametrize(("future_class", "client_class"), FUTURE_CLASSES)
def test_every_attribute_of_a_client_is_waited_for(
    future_class: type[ClientFuture[Any]], client_class: type, lease: SessionLease
) -> None:
    assert set(vars(client_class(lease, "id"))) == future_class.CLIENT_ATTRIBUTES


@pytest.mark.parametrize("client_class", [TrainingClient, SamplingClient])
def test_no_name_of_a_client_is_hidden_by_the_future(client_class: type) -> None:
    names = {name for name in dir(client_class) if not name.startswith("__")}

    assert names & set(dir(APIFuture)) == set()


def test_a_client_future_is_both_a_future_and_a_client(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    future = TrainingClientFuture(creating)
    client = TrainingClient(lease, "run-1")
    creating.settle(client)

    assert isinstance(future, TrainingClient)
    assert isinstance(future, APIFuture)
    assert isinstance(future.future(), concurrent.futures.Future)
    assert future.result() is client
    assert asyncio.run(future.coroutine()) is client
    assert future.model_id == "run-1"
    assert repr(future) == repr(client) == "TrainingClient(model_id='run-1')"


def test_the_client_itself_is_not_awaitable(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    """Programs unwrap until nothing is left to await: `while isawaitable(x): x = await x`."""
    future = TrainingClientFuture(creating)
    creating.settle(TrainingClient(lease, "run-1"))

    assert inspect.isawaitable(future)
    assert not inspect.isawaitable(future.result())
    assert not hasattr(future.result(), "result")


def test_direct_use_shares_the_queue_of_the_client(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    future = TrainingClientFuture(creating)
    client = TrainingClient(lease, "run-1")
    creating.settle(client)

    assert future._submitter is client._submitter
    assert "_submitter" in vars(future)  # found without a detour


def test_an_attribute_waits_until_the_client_is_created(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    future = TrainingClientFuture(creating)
    threading.Timer(0.05, creating.settle, [TrainingClient(lease, "run-1")]).start()

    assert future.model_id == "run-1"


def test_direct_use_raises_the_error_of_the_creation(creating: APIFuture[TrainingClient]) -> None:
    future = TrainingClientFuture(creating)
    creating.fail(NotFoundError("no such model"))

    for use in (lambda: future.model_id, future.get_console_url, future.result):
        with pytest.raises(NotFoundError, match="no such model"):
            use()
    with pytest.raises(NotFoundError, match="no such model"):
        future.holder = None  # type: ignore[misc, assignment]


def test_names_that_no_client_has_are_not_waited_for(creating: APIFuture[TrainingClient]) -> None:
    """Shells look for `_repr_html_` and others before they show an object."""
    future = TrainingClientFuture(creating)

    assert not hasattr(future, "_repr_html_")
    assert not hasattr(future, "_ipython_canary_method_should_not_exist_")
    assert "state=pending" in repr(future)
    with pytest.raises(AttributeError, match="'TrainingClientFuture' object has no attribute 'mo'"):
        future.mo  # type: ignore[attr-defined]  # noqa: B018


def test_a_failed_creation_can_be_shown(creating: APIFuture[TrainingClient]) -> None:
    future = TrainingClientFuture(creating)
    creating.fail(NotFoundError("no such model"))

    assert "NotFoundError" in repr(future)


def test_cancelling_the_future_cancels_the_creation(creating: APIFuture[TrainingClient]) -> None:
    future = TrainingClientFuture(creating)

    assert future.cancel()

    assert creating.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.model_id  # noqa: B018


def test_a_cancelled_creation_cancels_the_future(creating: APIFuture[TrainingClient]) -> None:
    future = TrainingClientFuture(creating)

    creating.cancel()

    assert future.cancelled()


def test_what_is_set_on_the_future_is_set_on_the_client(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    """The client calls `on_queue_state_change`, which programs replace."""
    future = TrainingClientFuture(creating)
    client = TrainingClient(lease, "run-1")
    creating.settle(client)

    with mock.patch.object(future, "on_queue_state_change") as replaced:
        client.on_queue_state_change(mock.Mock(), None)
        assert future.on_queue_state_change is replaced
    assert replaced.called
    assert "on_queue_state_change" not in vars(client)
    assert "on_queue_state_change" not in vars(future)


def test_attributes_set_on_the_client_are_found_on_its_future(
    creating: APIFuture[TrainingClient], lease: SessionLease
) -> None:
    future = TrainingClientFuture(creating)
    client = TrainingClient(lease, "run-1")
    creating.settle(client)

    client.note = 5  # type: ignore[attr-defined]

    assert future.note == 5  # type: ignore[attr-defined]


def test_pickling_the_future_of_a_client_gives_the_error_of_the_client(
    creating: APIFuture[TrainingClient],
) -> None:
    with pytest.raises(TypeError, match="a TrainingClient cannot be pickled"):
        pickle.dumps(TrainingClientFuture(creating))
    with pytest.raises(TypeError, match="a TrainingClient cannot be pickled"):
        copy.copy(TrainingClientFuture(creating))  # type: ignore[unused-awaitable]


def test_without_a_running_loop_the_creation_is_waited_for(
    creating: APIFuture[TrainingClient],
) -> None:
    future = TrainingClientFuture(creating)
    threading.Timer(0.05, creating.fail, [NotFoundError("no such model")]).start()

    with pytest.raises(NotFoundError, match="no such model"):
        future.in_thread()  # type: ignore[unused-awaitable]


def test_where_a_loop_runs_the_creation_is_not_waited_for(
    creating: APIFuture[TrainingClient],
) -> None:
    future = TrainingClientFuture(creating)

    async def ask() -> TrainingClientFuture:
        return future.in_thread()

    assert asyncio.run(ask()) is future
    assert not future.done()
