"""Sizes as people read them."""

from __future__ import annotations

MISSING = "N/A"
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(size_bytes: int | None) -> str:
    """A size in units of 1024, such as `117.7 MB`."""
    if size_bytes is None or size_bytes < 0:
        return MISSING
    size, units = float(size_bytes), list(_UNITS)
    # 1023.95 would be written as 1024.0 of the smaller unit.
    while size >= 1023.95 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
