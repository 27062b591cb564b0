"""The reference pages are up to date and complete."""

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
from tinsmith.service.api.routes import collect

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")

    assert written == reference_page(name), "run `python scripts/reference.py --write`"


def test_every_reference_page_is_generated() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_command_and_option_is_documented() -> None:
    page = reference_page("cli.md")

    for level in levels(root_parser()):
        if level.words and not level.commands:
            assert f"## tinsmith {' '.join(level.words)}\n" in page
        for option in level.options:
            is_setting = option.dest.startswith("setting_")
            listed = reference_page("settings.md") if is_setting else page
            assert option.option_strings[-1] in listed, (level.words, option.option_strings)
            assert option.help, (level.words, option.option_strings)


def test_every_error_documents_its_meaning_and_remedy() -> None:
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
        for folder in ("client", "engine/files")
        for path in sorted((ROOT / "src" / "tinsmith" / folder).rglob("*.py"))
    )
    read = set(re.findall(r'"((?:TINKER|TINSMITH|HF|HUGGINGFACE|XDG|CLOUDFLARE)_[A-Z_]+)"', source))

    assert read == set(VARIABLES)
