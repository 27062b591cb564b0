"""Every link within the repository, from the README and docs/, has a target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that mkdocs gives to the headings of a page."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in found)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def _links() -> list[tuple[Path, str]]:
    return [
        (page, link)
        for page in PAGES
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if not link.startswith(("http://", "https://", "mailto:"))
    ]


@pytest.mark.parametrize(
    ("page", "link"), _links(), ids=lambda one: one.name if isinstance(one, Path) else one
)
def test_every_link_resolves(page: Path, link: str) -> None:
    target, _, anchor = link.partition("#")
    found = (page.parent / target).resolve() if target else page

    assert found.exists(), f"{page.name}: {link}"
    if anchor:
        assert anchor in _anchors(found), f"{page.name}: {link}"


def test_the_docs_contain_links() -> None:
    assert len(_links()) > 50


def test_the_start_page_links_to_every_page() -> None:
    first = ROOT / "docs" / "index.md"
    linked = {
        (first.parent / link.partition("#")[0]).resolve()
        for page, link in _links()
        if page == first
    }

    assert set((ROOT / "docs").rglob("*.md")) - linked == {first}
