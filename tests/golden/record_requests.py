"""Write what `examples.py` looks like on the wire into `requests.txt` and `prompts.txt`.

    .venv/bin/python -m tests.golden.record_requests

Run it when a request changes on purpose, and read the difference: it is what servers will see.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.golden.examples import FULL, MINIMAL, PROMPTS
from tinsmith.wire import json_format
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import to_http

FOLDER = Path(__file__).parent


def request_lines() -> list[str]:
    """One line for each example: the route, which example, and all that is sent."""
    return [
        f"{name} {kind} {on_the_wire(name, request)}".rstrip()
        for name in ENDPOINTS
        for kind, requests in (("minimal", MINIMAL), ("full", FULL))
        if (request := requests.get(name)) is not None
    ]


def on_the_wire(name: str, request: Any) -> str:
    """Method, path and query, headers that the request itself brings, and the body."""
    endpoint = ENDPOINTS[name]
    sent = to_http(endpoint, request)
    query = f"?{urlencode(sent.query)}" if sent.query else ""
    headers = [
        f"{h}:{sent.headers[h]}" for h in endpoint.header_fields.values() if h in sent.headers
    ]
    body = b"".join(sent.parts)
    is_binary = endpoint.request_format is Format.PROTOBUF
    text = base64.b64encode(body).decode() if is_binary else body.decode()
    return " ".join([sent.method, sent.path + query, *headers, text])


def prompt_lines() -> list[str]:
    """One line for each prompt: its name and its JSON."""
    return [f"{name} {json_format.encode(prompt).decode()}" for name, prompt in PROMPTS.items()]


if __name__ == "__main__":
    for file, lines in (("requests.txt", request_lines()), ("prompts.txt", prompt_lines())):
        (FOLDER / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
