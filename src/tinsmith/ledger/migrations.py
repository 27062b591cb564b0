"""Which changes a database still needs, and which databases are refused.

The database says in its table `migrations` which changes it has had. Each change is one
transaction together with its row there, so a crash leaves it undone. Anything else than a
beginning of our own list is refused with the way out: a newer version made it, or it was changed
by hand or restored from parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.errors import LedgerVersionError
from tinsmith.ledger.statements import Migration

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
                f"{where} was changed by another {name} than this version has",
                remedy=_RESTORE,
            )
    return known[newest:]
