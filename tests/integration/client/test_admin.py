"""Usage, storage and the audit log, for administrators."""

from __future__ import annotations

import asyncio
import datetime

import pytest

from tests.integration.client.scripted_server import Connection, Received, scripted_server
from tinsmith.client.admin import AdminClient
from tinsmith.client.rest import RestClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import APIError, PermissionDeniedError, ValidationError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import Datum, ModelInput

WAIT_S = 60.0
DATUM = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})


@pytest.fixture
def admin(service: ScriptedService) -> AdminClient:
    return AdminClient(base_url=service.base_url, api_key=service.api_key)


def test_the_audit_log_lists_what_was_done(admin: AdminClient, training: TrainingClient) -> None:
    path = training.save_state("c1").result(WAIT_S).path

    entries = admin.get_audit_log("checkpoints").result(WAIT_S).entries

    assert [(entry.event, entry.tinker_path) for entry in entries] == [("checkpoint.created", path)]


def test_the_audit_log_is_filtered_by_day_and_kind(
    admin: AdminClient, training: TrainingClient, service: ScriptedService
) -> None:
    training.save_state("c1").result(WAIT_S)

    long_ago = admin.get_audit_log(day=datetime.date(2020, 1, 31)).result(WAIT_S)
    of_teams = admin.get_audit_log("teams").result(WAIT_S)

    assert long_ago.entries == of_teams.entries == []
    assert service.requests("get_audit_log")[0].query == {"event_type": "all", "day": "2020-01-31"}


def test_the_audit_log_can_be_awaited_on_the_caller_s_event_loop(admin: AdminClient) -> None:
    log = asyncio.run(admin.get_audit_log_async())

    assert log.entries == []


def test_usage_can_be_requested_with_datetimes_or_strings(
    admin: AdminClient, training: TrainingClient, service: ScriptedService
) -> None:
    training.forward_backward([DATUM], "cross_entropy").result(WAIT_S)
    hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    later = hour + datetime.timedelta(hours=2)

    by_time = admin.get_billing_usage(hour, later).result(WAIT_S)
    by_text = admin.get_billing_usage(hour.isoformat(), f"{later:%Y-%m-%dT%H:00:00Z}").result(
        WAIT_S
    )

    assert [event.event_info.type for event in by_time.data] == ["training"]
    assert [event.event_info.type for event in by_text.data] == ["training"]
    asked = [received.query["ending_before"] for received in service.requests("get_billing_usage")]
    assert asked[1] == f"{later:%Y-%m-%dT%H:00:00Z}"


def test_an_invalid_time_is_rejected_immediately(
    admin: AdminClient, service: ScriptedService
) -> None:
    with pytest.raises(ValidationError, match="starting_on"):
        _ = admin.get_billing_usage("yesterday", "2026-07-14T00:00:00Z")
    with pytest.raises(ValueError, match="ending_before"):
        _ = admin.get_billing_usage("2026-07-14T00:00:00Z", "")

    assert service.requests() == []


def test_storage_is_counted_by_project(admin: AdminClient, training: TrainingClient) -> None:
    training.save_state("c1").result(WAIT_S)

    everything = admin.get_current_checkpoint_storage_usage().result(WAIT_S)
    elsewhere = asyncio.run(admin.get_current_checkpoint_storage_usage_async("project-other"))

    assert [item.checkpoint_count for item in everything.data] == [1]
    assert everything.data[0].size_bytes > 0
    assert elsewhere.data == []


def test_a_missing_admin_role_is_reported_immediately(
    admin: AdminClient, service: ScriptedService
) -> None:
    service.faults.add("get_current_checkpoint_storage_usage", status=403)

    with pytest.raises(PermissionDeniedError):
        admin.get_current_checkpoint_storage_usage().result(WAIT_S)

    assert len(service.requests("get_current_checkpoint_storage_usage")) == 1


def test_moved_methods_still_work_and_warn_at_the_caller_s_line(
    service: ScriptedService,
) -> None:
    rest = RestClient(base_url=service.base_url, api_key=service.api_key)

    with pytest.warns(FutureWarning, match=r"AdminClient\.get_audit_log") as told:
        rest.get_audit_log().result(WAIT_S)
    with pytest.warns(FutureWarning):
        rest.get_billing_usage("2026-07-13T00:00Z", "2026-07-14T00:00Z").result(WAIT_S)
    with pytest.warns(FutureWarning):
        asyncio.run(rest.get_current_checkpoint_storage_usage_async())

    assert told[0].filename == __file__
    assert len(service.requests("client_config")) == 1


def test_the_audit_log_follows_a_redirect() -> None:
    with running_service(audit_redirects=True) as service:
        admin = AdminClient(base_url=service.base_url, api_key=service.api_key)

        log = admin.get_audit_log().result(WAIT_S)

    assert log.entries == []
    assert "/downloads/audit.json" in [received.path for received in service.requests()]


def test_no_credential_is_sent_after_a_redirect_to_another_host(service: ScriptedService) -> None:
    """The key is the service's own; a file server has no business with it."""

    async def answer(_: Received, connection: Connection) -> None:
        await connection.reply(b'{"entries": []}', headers={"Content-Type": "application/json"})

    async def scenario() -> list[Received]:
        async with scripted_server(answer) as elsewhere:
            service.faults.add(
                "get_audit_log",
                status=302,
                headers={"Location": f"{elsewhere.url}/log?signature=a%2Fb"},
            )
            admin = AdminClient(base_url=service.base_url, api_key=service.api_key)
            assert (await admin.get_audit_log_async()).entries == []
            return elsewhere.received

    fetched = asyncio.run(scenario())

    assert len(fetched) == 1
    assert "x-api-key" not in fetched[0].headers
    assert service.api_key not in str(fetched[0].headers)
    assert fetched[0].target.startswith("/log?signature=a")


@pytest.mark.parametrize(
    "address",
    ["file:///etc/passwd", "nowhere:", "ftp://host/log", "http://[::1", "http://h:x/"],
)
def test_a_redirect_to_a_scheme_other_than_http_is_rejected(
    admin: AdminClient, service: ScriptedService, address: str
) -> None:
    service.faults.add("get_audit_log", status=302, headers={"Location": address})

    with pytest.raises(APIError, match="invalid address"):
        admin.get_audit_log().result(WAIT_S)


def test_redirect_loops_end(admin: AdminClient, service: ScriptedService) -> None:
    around = f"{service.base_url}/api/v1/audit"
    service.faults.add("get_audit_log", times=None, status=302, headers={"Location": around})

    with pytest.raises(APIError, match="more than 5"):
        admin.get_audit_log().result(WAIT_S)
