from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tinsmith.observe.log_fields import (
    FIELDS,
    JsonFormatter,
    bind,
    configure_logging,
    without_secrets,
)

LOG = logging.getLogger("tinsmith.test")
KEY = "tml-pGjoMpKT0QRmUW0qJaC-QryJX2Ba79yms3ovTjlr8ac"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"


class Lines:
    """What was logged since the test began."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def text(self) -> list[str]:
        return self._stream.getvalue().splitlines()

    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text()]


def logging_to(format_: Literal["text", "json"], level: str = "info") -> Iterator[Lines]:
    stream = io.StringIO()
    restore = configure_logging(level=level, format_=format_, stream=stream)
    yield Lines(stream)
    restore()


@pytest.fixture
def as_text() -> Iterator[Lines]:
    yield from logging_to("text")


@pytest.fixture
def as_json() -> Iterator[Lines]:
    yield from logging_to("json")


def log_with(fields: dict[str, Any], message: str, *args: object, **settings: Any) -> None:
    """Log a line as a task does that has these fields."""

    def log() -> None:
        bind(**fields)
        LOG.info(message, *args, **settings)

    contextvars.copy_context().run(log)


def test_a_log_line_has_its_own_fields_and_those_of_its_context(as_json: Lines) -> None:
    async def exchange() -> None:
        bind(request="r1", tenant="acme")
        LOG.warning("begun")
        bind(model="m1", session=None)
        LOG.info("passed %s over", 7, extra={"command": "m1:7", "duration_ms": 1.5})

    asyncio.run(exchange())
    LOG.info("outside")

    begun, inside, outside = as_json.json()
    assert (begun["tenant"], "model" in begun) == ("acme", False)
    assert inside["message"] == "passed 7 over"
    assert (inside["level"], inside["logger"]) == ("info", "tinsmith.test")
    names = ("request", "tenant", "model", "command", "duration_ms")
    assert [inside[name] for name in names] == ["r1", "acme", "m1", "m1:7", 1.5]
    assert "session" not in inside
    assert not outside.keys() & FIELDS.keys()


def test_no_field_overrides_a_standard_field() -> None:
    assert not FIELDS.keys() & {"time", "level", "logger", "message", "traceback"}
    assert not FIELDS.keys() & vars(logging.makeLogRecord({})).keys()


def test_text_format_has_the_same_fields(as_text: Lines) -> None:
    log_with({"tenant": "acme", "model": "m1"}, "settled")

    [line] = as_text.text()
    assert line.endswith(" INFO    tinsmith.test: settled  tenant=acme model=m1")
    assert line[:4].isdigit()
    assert line[23] == "Z"


def test_tasks_do_not_share_their_fields(as_json: Lines) -> None:
    async def handle(tenant: str, started: asyncio.Event, others: asyncio.Event) -> None:
        bind(tenant=tenant)
        started.set()
        await others.wait()
        LOG.info("of %s", tenant)

    async def both() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(handle("a", a, b), handle("b", b, a))

    asyncio.run(both())

    assert {(line["tenant"], line["message"]) for line in as_json.json()} == {
        ("a", "of a"),
        ("b", "of b"),
    }


def test_an_unlisted_field_raises() -> None:
    with pytest.raises(AssertionError, match="colour"):
        bind(colour="red")


@pytest.mark.parametrize("format_", ["text", "json"])
def test_no_message_can_add_a_line_or_inject_terminal_escapes(
    format_: Literal["text", "json"],
) -> None:
    hostile = "a\nFATAL forged\r\x1b[2J\u2028b\0\ud800"
    for lines in logging_to(format_):
        log_with({"model": hostile}, "got %s", hostile)

        [line] = lines.text()
        assert line.isprintable()


@pytest.mark.parametrize("format_", ["text", "json"])
def test_keys_tokens_and_passwords_are_masked_everywhere(
    format_: Literal["text", "json"],
) -> None:
    address = "postgresql://me:hunter2@db/x"
    for lines in logging_to(format_):
        said = "key %s, token %s at %s"
        log_with({"model": KEY}, said, KEY, TOKEN, address, extra={"error": TOKEN})
        try:
            raise RuntimeError(f"refused {KEY} {address}")
        except RuntimeError:
            LOG.exception("failed")

        text = "\n".join(lines.text())
        assert "failed" in text
        assert not [secret for secret in (KEY, TOKEN, "hunter2", KEY[5:]) if secret in text]


def test_masking_leaves_other_text_unchanged() -> None:
    text = "tinker://run/weights/a took 5 s; see tml-… and http://host:80/x and a@b"

    assert without_secrets(text) == text


def test_a_traceback_is_part_of_its_log_record(as_text: Lines) -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        LOG.exception("could not")

    first, *rest = as_text.text()
    assert "could not" in first
    assert rest[-1].strip() in ("ValueError: bad", "value")
    assert all(line.startswith("    ") for line in rest)


def test_values_that_json_cannot_represent_are_logged_as_strings(as_json: Lines) -> None:
    LOG.info("x", extra={"duration_ms": float("nan"), "tokens": float("inf"), "batch": object()})
    LOG.info("x", extra={"status": 200, "commands": True, "message_": "no field"})

    first, second = as_json.json()
    assert (first["duration_ms"], first["tokens"]) == ("nan", "inf")
    assert isinstance(first["batch"], str)
    assert (second["status"], second["commands"]) == (200, True)
    assert "message_" not in second


def test_a_log_call_with_wrong_arguments_is_logged_anyway() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "%d of %d", ("many",), None)

    line = json.loads(JsonFormatter().format(record))

    assert "many" in line["message"]


def test_other_libraries_log_only_warnings() -> None:
    for lines in logging_to("text", level="debug"):
        LOG.debug("ours")
        logging.getLogger("other").info("theirs")
        logging.getLogger("other").warning("theirs, and worth it")

        assert [line.split(": ")[1] for line in lines.text()] == ["ours", "theirs, and worth it"]


def test_the_previous_logging_configuration_can_be_restored() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("tinsmith").level)

    configure_logging(level="error", format_="json", stream=io.StringIO())()

    assert (root.handlers[:], root.level, logging.getLogger("tinsmith").level) == before
