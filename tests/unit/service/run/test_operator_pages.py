"""What is answered before the service is open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.integration.service.api.in_process import InProcess
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.ledger.board import SchedulerReport
from tinsmith.service.run.free_space import FreeSpace
from tinsmith.service.run.operator_pages import OperatorPages


def _ask(pages: OperatorPages, path: str, method: str = "GET") -> tuple[int, dict[str, str], Any]:
    return asyncio.run(_answered(pages, path, method))


async def _answered(
    pages: OperatorPages, path: str, method: str = "GET", *, host: str = ""
) -> tuple[int, dict[str, str], Any]:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    given = [(b"host", host.encode())] if host else []
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    await HttpEdge(pages)(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(sent[1]["body"])


def test_health_and_readiness_are_served_while_models_are_loaded() -> None:
    pages = OperatorPages(has_metrics=True)
    pages.waits_for = "owner/model: downloading, 3.0 MB of 90.0 MB"

    assert _ask(pages, "/healthz")[0] == 200
    status, _, told = _ask(pages, "/readyz")
    assert (status, told["status"]) == (503, "not ready")
    assert told["problem"] == "owner/model: downloading, 3.0 MB of 90.0 MB"


@pytest.mark.parametrize(
    ("path", "method"),
    [("/api/v1/healthz", "GET"), ("/api/v1/forward_backward", "POST"), ("/healthz", "POST")],
)
def test_before_the_service_is_ready_other_paths_are_503_with_retry_after(
    path: str, method: str
) -> None:
    pages = OperatorPages(has_metrics=True)

    status, headers, told = _ask(pages, path, method)

    assert (status, headers["retry-after"]) == (503, "1")
    assert "not ready yet: the service is starting" in told["detail"]


def test_a_nearly_full_disk_is_reported_while_the_service_is_still_ready(
    tmp_path: Path,
) -> None:
    pages = OperatorPages(has_metrics=True)
    space = FreeSpace(tmp_path, lambda _: 5_000_000)
    asyncio.run(space.look())
    board = SimpleNamespace(readiness=SchedulerReport(is_ready=True))
    service: Any = SimpleNamespace(
        ledger=SimpleNamespace(board=board),
        free_space=space,
        app=SimpleNamespace(check_reached=AsyncMock()),
    )
    pages.service = service

    status, _, told = _ask(pages, "/readyz")

    assert (status, told["status"]) == (200, "ready")
    assert "5 MB left" in told["problem"]


def test_health_is_served_while_the_ledger_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the machine is answered whether or not there are keys: none is looked up."""

    async def never(_: object) -> bool:
        raise AssertionError("it would wait for the ledger")

    async def ask() -> tuple[int, dict[str, str], Any]:
        running = InProcess()
        monkeypatch.setattr(type(running.app.context.authenticator), "has_keys", never)
        pages = OperatorPages(has_metrics=True)
        service: Any = SimpleNamespace(
            ledger=running.ledger, free_space=FreeSpace(Path()), app=running.app
        )
        pages.service = service
        running.ledger.board.publish_report(SchedulerReport(problem="the ledger is away"))
        return await _answered(pages, "/readyz", host="127.0.0.1:8000")

    status, _, told = asyncio.run(ask())

    assert (status, told["problem"]) == (503, "the ledger is away")


def _pages(role: str, report: SchedulerReport, **fields: Any) -> OperatorPages:
    pages = OperatorPages(has_metrics=True, role=role)
    board = SimpleNamespace(readiness=report, store_problem=fields.pop("store_problem", None))
    pages.service = SimpleNamespace(  # type: ignore[assignment]
        ledger=SimpleNamespace(board=board),
        free_space=SimpleNamespace(problem=None),
        app=SimpleNamespace(check_reached=AsyncMock()),
        is_standing_by=fields.pop("is_standing_by", False),
    )
    return pages


def test_an_api_server_is_ready_without_a_scheduler_and_says_so() -> None:
    status, _, told = _ask(_pages("api", SchedulerReport(problem="no scheduler")), "/readyz")

    assert (status, told) == (200, {"status": "ready", "problem": "no scheduler"})


def test_an_api_server_without_its_store_is_not_ready() -> None:
    report = SchedulerReport(problem="the store is gone")
    status, _, told = _ask(_pages("api", report, store_problem="the store is gone"), "/readyz")

    assert (status, told["problem"]) == (503, "the store is gone")


def test_a_scheduler_that_waits_for_its_turn_is_ready_to_take_over() -> None:
    pages = OperatorPages(has_metrics=True, role="scheduler")
    pages.waits_for, pages.is_standby = "standing by", True
    assert _ask(pages, "/readyz")[::2] == (200, {"status": "standby", "problem": "standing by"})

    pages = _pages("scheduler", SchedulerReport(is_ready=True), is_standing_by=True)
    assert _ask(pages, "/readyz")[2]["status"] == "standby"


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/v1/optim_step"), ("GET", "/docs")])
def test_a_scheduler_answers_no_requests_of_the_api(method: str, path: str) -> None:
    for pages in (
        OperatorPages(has_metrics=True, role="scheduler"),
        _pages("scheduler", SchedulerReport(is_ready=True)),
    ):
        status, _, told = _ask(pages, path, method)

        assert status == 404
        assert "--role api" in told["detail"]
