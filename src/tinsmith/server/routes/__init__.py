"""What answers each endpoint. A module here is a group of routes; see `call.py`.

| in a module | what it is |
|---|---|
| `HANDLERS` | from names of endpoints to handlers |
| `FURTHER_ENDPOINTS` | endpoints of our own that `wire/endpoints.py` does not have, if any |
| `OPEN` | names of endpoints that need no credential, if any |
"""

from __future__ import annotations

MODULES: tuple[str, ...] = ()
"""In the order in which their paths are tried."""
