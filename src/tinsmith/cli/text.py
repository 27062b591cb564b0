"""Values formatted for people: times, counts, and text that is safe to print on a terminal."""

from __future__ import annotations

from tinsmith.observe import terminal

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    import datetime

MISSING = terminal.MISSING
_DAY_S = 24 * 3600.0


def printable(text: str) -> str:
    """The text on one line, with control characters escaped.

    Names and messages from a service could otherwise send control sequences to the terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """The text with control characters escaped, except newlines and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def width_of(text: str) -> int:
    """The width of a text in terminal columns."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def time_text(moment: datetime.datetime | None, *, now: datetime.datetime | None = None) -> str:
    """A time relative to now, such as `2 hours ago`; the date beyond 30 days."""
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
    """`Yes`, `No`, or `N/A` if unknown."""
    return MISSING if value is None else "Yes" if value else "No"


def counted(number: int, noun: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def moment_from(text: str) -> datetime.datetime:
    """An argument `type=`: an ISO 8601 time, in UTC unless it has an offset.

    Raises:
        ValueError: The text is not a time.
    """
    import datetime

    moment = datetime.datetime.fromisoformat(text.strip())
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


moment_from.__name__ = "ISO 8601 time"  # argparse's name for it in error messages
