"""The settings file of docs/scaling.md starts servers that work together."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contract import postgres_server
from tests.e2e.service.served import BASE_MODEL, Served
from tests.e2e.service.several_servers import until
from tests.e2e.service.training_run import train

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


def test_the_settings_file_of_several_servers_works_as_printed(tmp_path: Path) -> None:
    """With this machine's addresses and the fake engine in place of those of the page."""
    [shown] = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    replaced = {
        "postgresql://tinsmith@db/tinsmith": postgres_server.new_database(),
        "s3://bucket/tinsmith": (tmp_path / "checkpoints").as_uri(),
        "Qwen/Qwen3-0.6B": BASE_MODEL,
    }
    for old, new in replaced.items():
        assert old in shown
        shown = shown.replace(old, new)
    config = tmp_path / "tinsmith.toml"
    config.write_text(f'engine = "fake"\n{shown}')
    servers = []
    try:
        for role in ("scheduler", "api"):
            folder = tmp_path / role
            folder.mkdir()
            servers.append(Served(folder, "--config", str(config), "--role", role))
            servers[-1].start(wait=False)
        until(servers[1].is_ready, servers[1].log_text)

        assert train(servers[1].base_url, 1, 2)
    finally:
        for server in servers:
            server.end()
