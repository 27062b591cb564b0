from __future__ import annotations

import re

import pytest

from tinsmith.types.record import Frozen, Record
from tinsmith.wire.endpoint_types import API_PREFIX, Answer, Endpoint, Format, Pool, RetryClass
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS

EVERY = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


def field_names(cls: type[Record] | type[Frozen]) -> set[str]:
    names: tuple[str, ...] = getattr(cls, "__struct_fields__", ()) or getattr(cls, "__slots__", ())
    return set(names)


@EVERY
def test_names_in_paths_headers_and_identities_are_fields(endpoint: Endpoint) -> None:
    names = field_names(endpoint.request)

    assert names >= set(endpoint.path_fields)
    assert names >= set(endpoint.header_fields)
    assert names >= set(endpoint.identity)


@EVERY
def test_a_route_is_under_the_prefix_and_uses_a_known_method(endpoint: Endpoint) -> None:
    assert endpoint.path.startswith(API_PREFIX + "/")
    assert endpoint.method in {"GET", "POST", "PUT", "DELETE"}
    assert endpoint.timeout_s > 0


@EVERY
def test_each_endpoint_names_its_response_type(endpoint: Endpoint) -> None:
    is_typed = endpoint.answer in (Answer.DIRECT, Answer.FUTURE)

    assert (endpoint.response is not None) is is_typed
    has_result = endpoint.answer in (Answer.FUTURE, Answer.EVENTS)
    assert (endpoint.result in FUTURE_RESULTS) is has_result


def test_each_route_is_listed_once() -> None:
    routes = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS.values()]

    assert len(set(routes)) == len(routes)
    assert all(name == endpoint.name for name, endpoint in ENDPOINTS.items())


def test_no_route_shadows_another() -> None:
    """A path with a name of several parts would swallow those that add a suffix to it."""

    def pattern(path: str) -> re.Pattern[str]:
        path = re.sub(r"{(\w+):path}", r"(?P<\1>.+)", path)
        return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))

    for endpoint in ENDPOINTS.values():
        example = re.sub(r"{\w+:path}", "weights/x", endpoint.path)
        example = re.sub(r"{\w+}", "id", example)
        found = next(
            other
            for other in ENDPOINTS.values()
            if other.method == endpoint.method and pattern(other.path).fullmatch(example)
        )
        assert found is endpoint


def test_path_fields_are_read_from_the_path() -> None:
    assert ENDPOINTS["delete_checkpoint"].path_fields == ("training_run_id", "checkpoint_id")
    assert ENDPOINTS["healthz"].path_fields == ()


def test_calls_that_must_not_wait_for_samples_have_their_own_connection_pools() -> None:
    pools = {name: ENDPOINTS[name].pool for name in ("asample", "session_heartbeat", "optim_step")}

    assert set(pools.values()) == {Pool.SAMPLE, Pool.SESSION, Pool.TRAIN}
    assert ENDPOINTS["retrieve_future"].pool is Pool.RETRIEVE


def test_samples_and_saves_keep_their_seq_id_on_a_retry() -> None:
    for name in ("asample", "save_weights", "save_weights_for_sampler", "save_weights_external"):
        assert ENDPOINTS[name].retry is RetryClass.CALL
        assert "seq_id" in ENDPOINTS[name].identity


def test_results_that_carry_arrays_are_protobuf() -> None:
    in_protobuf = {name for name, kind in FUTURE_RESULTS.items() if kind.format is Format.PROTOBUF}

    assert in_protobuf == {"ForwardBackward", "Forward", "Sample"}
    assert ENDPOINTS["forward_backward"].request_format is Format.PROTOBUF
    assert ENDPOINTS["forward"].request_format is Format.JSON
