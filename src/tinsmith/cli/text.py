"""Values as people read them: sizes, times, and text that cannot play tricks on a terminal."""

from __future__ import annotations

from tinsmith.observe import sizes

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    import datetime

MISSING = sizes.MISSING
_DAY_S = 24 * 3600.0


def printable(text: str) -> str:
    """The text on one line, with control characters spelt out.

    Names and messages come from elsewhere, and a terminal obeys what it is sent.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """The text with its lines and tabs, and other control characters spelt out."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def width_of(text: str) -> int:
    """How many columns a terminal gives to a text."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def time_text(moment: datetime.datetime | None, *, now: datetime.datetime | None = None) -> str:
    """How long ago, or in how long; the day itself beyond 30 days."""
    if moment is None:
        return MISSING
    import datetime

    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    passed_s = ((now or datetime.datetime.now(datetime.UTC)) - moment).total_seconds()
    distance_s = abs(passed_s)
    if distance_s > 30 * _DAY_S:
        return moment.astimezone(datetime.UTC).date().isoformat()
    for unit, unit_s in (("day", _DAY_S), ("hour", 3600.0), ("minute", 60.0)):
        count = int(distance_s // unit_s)
        if count:
            amount = f"{count} {unit}{'' if count == 1 else 's'}"
            return f"{amount} ago" if passed_s > 0 else f"in {amount}"
    return "just now" if passed_s >= 0 else "in less than a minute"


def yes_or_no(value: bool | None) -> str:
    """`Yes`, `No`, or that it is not known."""
    return MISSING if value is None else "Yes" if value else "No"


def counted(number: int, noun: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def moment_from(text: str) -> datetime.datetime:
    """A moment from ISO 8601, in UTC where it names no zone; for `type=` of an argument.

    Raises:
        ValueError: It is not of that form.
    """
    import datetime

    moment = datetime.datetime.fromisoformat(text.strip())
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


moment_from.__name__ = "ISO 8601 time"  # what argparse calls a value that is none
