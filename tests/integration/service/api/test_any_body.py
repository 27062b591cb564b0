"""Whatever is sent to whichever endpoint, the answer is no 5xx, and a refusal has words."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.service.api.in_process import InProcess, Reply
from tests.integration.service.api.running import MODEL
from tests.integration.service.api.test_tenants import request_for
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS

POSTED = sorted(name for name, endpoint in ENDPOINTS.items() if endpoint.method in ("POST", "PUT"))
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 1e308, -0.0, 0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "..", "a/b", "\0", "tinker://x/weights/y", "x" * 5000, "%00", "session-"]),
    st.lists(st.integers(-5, 2000), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Everywhere in a body where something stands."""
    found = [path] if path else []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(body: Any, place: tuple[Any, ...], value: Any, *, drop: bool) -> Any:
    """The body with something else in one place, or nothing."""
    body = copy.deepcopy(body)
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    if drop:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return body


async def set_up() -> tuple[InProcess, str]:
    """A service with a session, a model and a sampler."""
    service = InProcess()

    async def post(name: str, **body: Any) -> Any:
        reply = await service.send("POST", ENDPOINTS[name].path, msgspec.json.encode(body))
        assert reply.status == 200, reply
        return reply.json()

    session = (await post("create_session", tags=[], sdk_version="1"))["session_id"]
    await post("create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    await post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=MODEL,
    )
    return service, session


def check(reply: Reply) -> None:
    """What is true of every answer."""
    assert 200 <= reply.status < 500, reply
    if reply.status >= 400:
        assert reply.status not in (402, 409)
        assert int(reply.headers["content-length"]) == len(reply.body) > 0
        told = reply.json()
        assert told.get("detail") or told.get("type") == "try_again"


@pytest.mark.parametrize("name", POSTED)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_mutated_json_body_gets_an_answer(name: str, data: st.DataObject) -> None:
    """One or two places of a good body hold something else."""
    endpoint: Endpoint = ENDPOINTS[name]

    async def work() -> None:
        service, session = await set_up()
        path, body = request_for(endpoint, session)
        if isinstance(body, bytes):
            cut = data.draw(st.integers(0, len(body)))
            mixed = body[:cut] + data.draw(st.binary(max_size=6)) + body[cut:]
            check(
                await service.send("POST", path, mixed, {"content-type": "application/x-protobuf"})
            )
            return
        for _ in range(data.draw(st.integers(1, 2))):
            where = places(body)
            if not where:
                break
            place = data.draw(st.sampled_from(where))
            body = changed(body, place, data.draw(ODD), drop=data.draw(st.booleans()))
        try:
            encoded = msgspec.json.encode(body)
        except (OverflowError, ValueError, UnicodeError):
            return
        check(await service.send(endpoint.method, path, encoded))

    asyncio.run(work())


@settings(max_examples=60)
@given(
    st.sampled_from(POSTED),
    st.binary(max_size=60),
    st.sampled_from(["", "gzip", "zstd", "br", "gzip, zstd", "identity"]),
    st.sampled_from(
        ["application/json", "application/x-protobuf", "application/x-tinsmith-packed", "x"]
    ),
)
def test_any_bytes_get_an_answer(name: str, body: bytes, encoding: str, content_type: str) -> None:
    """In any encoding and of any type that they claim to be."""

    async def work() -> None:
        service, session = await set_up()
        path, _ = request_for(ENDPOINTS[name], session)
        headers = {"content-type": content_type, "content-encoding": encoding}
        check(await service.send(ENDPOINTS[name].method, path, body, headers))

    asyncio.run(work())


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(ENDPOINTS.keys() - set(POSTED))),
    st.text(max_size=10),
    st.dictionaries(
        st.sampled_from(["limit", "offset", "access_scope", "day", "event_type", "project_id"]),
        st.one_of(st.text(max_size=6), st.sampled_from(["-1", "1e9", str(10**30), "2026-02-30"])),
    ),
)
def test_any_ids_and_queries_get_an_answer(name: str, odd: str, query: dict[str, str]) -> None:
    """In paths and behind them."""
    from urllib.parse import quote, urlencode

    async def work() -> None:
        service, session = await set_up()
        path, _ = request_for(ENDPOINTS[name], quote(odd, safe="") or session)
        reply = await service.send(
            ENDPOINTS[name].method, path, query=urlencode(query, errors="replace")
        )
        check(reply)

    asyncio.run(work())
