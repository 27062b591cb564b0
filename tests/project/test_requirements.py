"""The page of requirements lists every requirement with the tests that prove it."""

from __future__ import annotations

from scripts.requirements import PAGE, page, proofs, requirements


def test_the_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")

    assert written == page(), "run `python scripts/requirements.py --write`"


def test_every_requirement_has_a_test_and_every_number_a_requirement() -> None:
    listed = [number for group in requirements().values() for number in group]

    assert listed == list(range(1, 46))
    assert set(proofs()) == set(listed)
