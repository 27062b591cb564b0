"""The SQL of the ledger, read from its files: named queries and numbered migrations.

Both databases share the queries and have migrations of their own. A query is a part of a file in
`queries/` that begins with `-- name: …`.

`missing` says which migrations a database still needs, and refuses databases that have others. The
database says in its table `migrations` which changes it has had. Each change is one transaction
together with its row there, so a crash leaves it undone. Anything else than a beginning of our own
list is refused with a remedy: a newer version made it, or it was changed by hand or restored from
parts.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from importlib import resources

import msgspec

from tinsmith.errors import LedgerVersionError

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


@functools.cache
def queries() -> dict[str, str]:
    """Every query by its name, with parameters $1, $2 and so on."""
    found: dict[str, str] = {}
    for file in resources.files("tinsmith.service.ledger").joinpath("queries").iterdir():
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
    folder = resources.files("tinsmith.service.ledger").joinpath("schema", database)
    found = []
    for file in folder.iterdir():
        match = _MIGRATION.fullmatch(file.name)
        if match:
            sql = file.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), file.name.removesuffix(".sql"), sql))
    found.sort(key=lambda migration: migration.number)
    assert [migration.number for migration in found] == list(range(1, len(found) + 1))
    return tuple(found)


CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS migrations "
    "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, digest TEXT NOT NULL)"
)
READ = "SELECT number, name, digest FROM migrations ORDER BY number"

_RESTORE = (
    "restore the backup from before the change, or start with a new data folder; "
    "nothing was changed now"
)


def missing(
    known: Sequence[Migration], applied: Sequence[tuple[int, str, str]], where: str
) -> Sequence[Migration]:
    """The changes that a database still needs.

    Args:
        known: All changes of this version.
        applied: What the database says it has had.
        where: The database, for messages.

    Raises:
        LedgerVersionError: It has had others than ours.
    """
    newest = max((number for number, _, _ in applied), default=0)
    if newest > len(known):
        names = ", ".join(name for number, name, _ in applied if number > len(known))
        raise LedgerVersionError(
            f"{where} was made by a newer version of tinsmith: this one does not know {names}",
            remedy="run the newer version again, or start with a new data folder; "
            "a ledger cannot be taken back to an older version",
        )
    if [number for number, _, _ in applied] != list(range(1, newest + 1)):
        raise LedgerVersionError(
            f"{where} is half-migrated: it has had the changes "
            f"{[number for number, _, _ in applied]} and not those between",
            remedy=_RESTORE,
        )
    for migration, (_, name, digest) in zip(known, applied, strict=False):
        if (migration.name, migration.digest) != (name, digest):
            raise LedgerVersionError(
                f"{where} was migrated by a different {name} than this version has",
                remedy=_RESTORE,
            )
    return known[newest:]
