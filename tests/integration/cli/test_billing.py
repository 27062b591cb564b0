"""`tinsmith billing`: tables, JSON and CSV."""

from __future__ import annotations

import csv
import datetime
import io

import pytest

from tests.integration.cli.command import Commands
from tinsmith.testing import ScriptedService

HOUR = datetime.datetime(2026, 7, 13, 8, tzinfo=datetime.UTC)
EVENT = {
    "bucket_start": "2026-07-13T08:00:00Z",
    "bucket_end": "2026-07-13T09:00:00Z",
    "base_model": "Qwen/Qwen3-8B",
    "session_id": "s",
}
USAGE = {
    "data": [
        {**EVENT, "estimated_cost_usd": 0.5, "event_info": {"type": "training", "token_count": 7}},
        {**EVENT, "event_info": {"type": "storage", "gigabyte_hours": 1.5}},
        {**EVENT, "event_info": {"type": "checkpoint", "count": 2}},
    ],
    "sessions": {"s": {"user_metadata": {"purpose": "a test"}}},
}
SPAN = ("2026-07-13T00:00:00Z", "2026-07-14")


@pytest.fixture
def usage(service: ScriptedService) -> None:
    service.faults.add(on="get_billing_usage", times=None, status=200, body=USAGE)


@pytest.mark.usefixtures("usage")
def test_usage_in_json_is_exact_and_missing_values_are_null(tinsmith: Commands) -> None:
    ended = tinsmith.run("billing", "usage", *SPAN, "-f", "json")

    assert ended.status == 0, ended.err
    first, second, _ = ended.json["data"]
    assert first["bucket_start"] == "2026-07-13T08:00:00Z"
    assert first["estimated_cost_usd"] == 0.5
    assert first["event_info"] == {"type": "training", "token_count": 7}
    assert second["estimated_cost_usd"] is None
    assert ended.json["sessions"] == {"s": {"user_metadata": {"purpose": "a test"}}}
    assert ended.json["cost_data_through"] is None


@pytest.mark.usefixtures("usage")
def test_the_usage_table_distinguishes_unknown_costs_from_inapplicable_ones(
    tinsmith: Commands,
) -> None:
    ended = tinsmith.run("billing", "usage", *SPAN)

    lines = ended.out.splitlines()
    assert lines[0] == "3 hourly usage rows"
    header, training, storage, checkpoint = lines[2:]
    cost = header.index("estimated_cost_usd")
    assert training[cost:].startswith("0.5 ")
    assert training.count("null") == 1
    assert storage[cost:].startswith("null")
    assert storage.count("null") == 2
    assert "null" not in checkpoint
    assert "project_id" not in header  # no row has one


@pytest.mark.usefixtures("usage")
def test_usage_is_written_to_csv_files_that_can_be_joined(tinsmith: Commands) -> None:
    ended = tinsmith.run("billing", "usage", *SPAN, "--csv", "-", "--sessions-csv", "sessions.csv")

    rows = list(csv.DictReader(io.StringIO(ended.out)))
    written = (tinsmith.folder / "sessions.csv").read_text()
    sessions = list(csv.DictReader(io.StringIO(written)))
    assert [row["type"] for row in rows] == ["training", "storage", "checkpoint"]
    assert [row["token_count"] for row in rows] == ["7", "", ""]
    assert sessions == [{"session_id": "s", "user_metadata": '{"purpose": "a test"}'}]
    assert ended.err == "Wrote 1 row to sessions.csv\n"


def test_usage_is_requested_in_utc(tinsmith: Commands, service: ScriptedService) -> None:
    ended = tinsmith.run("billing", "usage", "2026-07-13T10:00:00+02:00", "2026-07-14T00:00")

    (asked,) = service.requests("get_billing_usage")
    assert ended.out == "No usage in this period\n"
    assert asked.request.starting_on == HOUR
    assert asked.request.ending_before == datetime.datetime(2026, 7, 14, tzinfo=datetime.UTC)


def test_storage_has_the_rate_in_its_first_column(
    tinsmith: Commands, service: ScriptedService
) -> None:
    item = {"project_id": "p", "checkpoint_count": 2, "size_bytes": 10, "size_gigabytes": 1e-8}
    body = {"effective_rate_usd_per_gigabyte_month": 0.1, "data": [item]}
    service.faults.add(on="get_current_checkpoint_storage_usage", times=None, status=200, body=body)

    shown = tinsmith.run("billing", "checkpoint-storage", "--project-id", "p")
    plain = tinsmith.run("billing", "checkpoint-storage", "-f", "json")
    rows = tinsmith.run("billing", "checkpoint-storage", "--csv", "-")

    assert shown.out.splitlines()[2].startswith("effective_rate_usd_per_gigabyte_month")
    assert shown.out.splitlines()[3].startswith("0.1 ")
    assert plain.json["data"][0]["user_email"] is None
    assert next(csv.DictReader(io.StringIO(rows.out)))["size_bytes"] == "10"
    assert service.requests("get_current_checkpoint_storage_usage")[0].request.project_id == "p"


def test_empty_storage_is_reported_in_words(tinsmith: Commands) -> None:
    assert tinsmith.run("billing", "checkpoint-storage").out == "No checkpoints stored\n"
