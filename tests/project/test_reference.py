"""The reference pages are what the code says now, and leave nothing out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.reference import FOLDER, PAGES, reference_page
from scripts.reference_pages.client import VARIABLES
from scripts.reference_pages.errors import public_errors
from scripts.reference_pages.markdown import paragraphs
from tinsmith import errors
from tinsmith.cli.completion import levels
from tinsmith.cli.main import root_parser
from tinsmith.server.routes import collect

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")

    assert written == reference_page(name), "run `python scripts/reference.py --write`"


def test_there_are_no_pages_that_no_code_makes() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_command_and_option_has_its_place_and_its_words() -> None:
    page = reference_page("cli.md")

    for level in levels(root_parser()):
        if level.words and not level.commands:
            assert f"## tinsmith {' '.join(level.words)}\n" in page
        for option in level.options:
            is_setting = option.dest.startswith("setting_")
            listed = reference_page("settings.md") if is_setting else page
            assert option.option_strings[-1] in listed, (level.words, option.option_strings)
            assert option.help, (level.words, option.option_strings)


def test_every_error_says_what_it_is_and_what_to_do() -> None:
    raised = {one for one in vars(errors).values() if isinstance(one, type)}
    ours = {one for one in raised if issubclass(one, errors.TinkerError)}

    assert ours <= public_errors()
    for error in public_errors():
        assert len(paragraphs(error)) > 1, f"{error.__name__} does not say what to do"


def test_every_route_is_listed_once() -> None:
    page = reference_page("routes.md")

    for endpoint in collect().endpoints:
        path = endpoint.path.replace(":path}", "}")
        assert page.count(f"`{endpoint.method} {path}`") == 1


def test_every_variable_that_the_client_reads_is_listed() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("client", "model_files")
        for path in sorted((ROOT / "src" / "tinsmith" / folder).rglob("*.py"))
    )
    read = set(re.findall(r'"((?:TINKER|TINSMITH|HF|HUGGINGFACE|XDG|CLOUDFLARE)_[A-Z_]+)"', source))

    assert read == set(VARIABLES)
