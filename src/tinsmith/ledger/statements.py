"""The SQL of the ledger, read from its files: named queries and numbered migrations.

Both databases share the queries and have migrations of their own. A query is a part of a file in
`queries/` that begins with `-- name: …`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

import msgspec

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


@functools.cache
def queries() -> dict[str, str]:
    """Every query by its name, with parameters $1, $2 and so on."""
    found: dict[str, str] = {}
    for file in resources.files("tinsmith.ledger").joinpath("queries").iterdir():
        if not file.name.endswith(".sql"):
            continue
        parts = _NAME.split(file.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            assert name not in found, f"{name} is in two files"
            found[name] = text.strip().rstrip(";")
    return found


@functools.cache
def sqlite_queries() -> dict[str, str]:
    """The same as SQLite wants them: $1 is the *name* of a parameter there, ?1 its number."""
    return {name: re.sub(r"\$(\d+)", r"?\1", text) for name, text in queries().items()}


class Migration(msgspec.Struct, frozen=True):
    """One change of the schema."""

    number: int
    name: str
    sql: str

    @property
    def digest(self) -> str:
        """Tells whether a database was changed by this text or by another of the same name."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@functools.cache
def migrations(database: str) -> tuple[Migration, ...]:
    """The changes that make today's schema from nothing, in order."""
    folder = resources.files("tinsmith.ledger").joinpath("schema", database)
    found = []
    for file in folder.iterdir():
        match = _MIGRATION.fullmatch(file.name)
        if match:
            sql = file.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), file.name.removesuffix(".sql"), sql))
    found.sort(key=lambda migration: migration.number)
    assert [migration.number for migration in found] == list(range(1, len(found) + 1))
    return tuple(found)
