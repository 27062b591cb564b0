"""Finds the endpoint of a method and a path, from the table in `endpoints.py`.

Ids appear in paths unescaped, including `:`. A checkpoint id has two segments and may be followed
by a suffix, so paths with fields are tried in the order of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS

Found = tuple[Endpoint, dict[str, str]]


class Router:
    """Finds endpoints by method and path."""

    def __init__(self, endpoints: Iterable[Endpoint] = ENDPOINTS.values()) -> None:
        self._fixed: dict[tuple[str, str], Endpoint] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Endpoint]] = []
        for endpoint in endpoints:
            if endpoint.path_fields:
                self._patterns.append((endpoint.method, _pattern(endpoint.path), endpoint))
            else:
                self._fixed[endpoint.method, endpoint.path] = endpoint

    def find(self, method: str, path: str) -> Found | None:
        """The endpoint and the fields in the path; None if no endpoint matches."""
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        for pattern_method, pattern, endpoint in self._patterns:
            if pattern_method == method and (match := pattern.fullmatch(path)):
                fields = {name: unquote(value) for name, value in match.groupdict().items()}
                return endpoint, fields
        return None

    def methods(self, path: str) -> list[str]:
        """The methods that a path supports."""
        fixed = [method for method, fixed_path in self._fixed if fixed_path == path]
        return fixed + [m for m, pattern, _ in self._patterns if pattern.fullmatch(path)]


def _pattern(template: str) -> re.Pattern[str]:
    """`{id}` matches one segment of a path, `{id:path}` one or more."""
    text = ""
    for part in re.split(r"({\w+(?::path)?})", template):
        field = re.fullmatch(r"{(\w+)(:path)?}", part)
        if field is None:
            text += re.escape(part)
        else:
            text += f"(?P<{field[1]}>{'.+' if field[2] else '[^/]+'})"
    return re.compile(text)
