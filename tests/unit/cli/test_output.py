from __future__ import annotations

import json

import pytest

from tinsmith.cli.output import Properties, Table, rendered, show

TABLE = Table("2 runs", ["Run ID", "Model"], [["a-long-id", "日本"], ["b", "x"]])


def test_columns_are_aligned_and_nothing_is_padded_at_the_end() -> None:
    assert rendered(TABLE, None).splitlines() == [
        "2 runs",
        "",
        "Run ID     Model",
        "a-long-id  日本",
        "b          x",
    ]


def test_a_table_that_is_wider_than_the_terminal_becomes_blocks_with_nothing_cut() -> None:
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


def test_an_empty_table_is_its_title() -> None:
    assert rendered(Table("No runs found", ["Run ID"], []), 80) == "No runs found"


def test_text_from_elsewhere_stays_on_its_line() -> None:
    shown = rendered(Properties("A run", [("Name", "evil\x1b[0m\nvalue")]), None)

    assert shown.splitlines() == ["A run", r"Name  evil\x1b[0m\nvalue"]


def test_json_is_exact_and_has_null_for_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = {"a": None, "b": [1.5, "é\x9b"]}

    show("json", plain, TABLE)

    out = capsys.readouterr().out
    assert json.loads(out) == plain
    assert out.isascii()
