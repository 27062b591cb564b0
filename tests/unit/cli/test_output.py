from __future__ import annotations

import json

import pytest

from tinsmith.cli.output import Properties, Table, rendered, show

TABLE = Table("2 runs", ["Run ID", "Model"], [["a-long-id", "日本"], ["b", "x"]])


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert rendered(TABLE, None).splitlines() == [
        "2 runs",
        "",
        "Run ID     Model",
        "a-long-id  日本",
        "b          x",
    ]


def test_a_table_wider_than_the_terminal_becomes_blocks_without_truncation() -> None:
    assert rendered(TABLE, 16) == rendered(TABLE, None)
    assert rendered(TABLE, 15).splitlines() == [
        "2 runs",
        "",
        "Run ID  a-long-id",
        "Model   日本",
        "",
        "Run ID  b",
        "Model   x",
    ]


def test_an_empty_table_shows_only_its_title() -> None:
    assert rendered(Table("No runs found", ["Run ID"], []), 80) == "No runs found"


def test_untrusted_text_stays_on_one_line() -> None:
    shown = rendered(Properties("A run", [("Name", "evil\x1b[0m\nvalue")]), None)

    assert shown.splitlines() == ["A run", r"Name  evil\x1b[0m\nvalue"]


def test_json_is_exact_and_missing_values_are_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = {"a": None, "b": [1.5, "é\x9b"]}

    show("json", plain, TABLE)

    out = capsys.readouterr().out
    assert json.loads(out) == plain
    assert out.isascii()
