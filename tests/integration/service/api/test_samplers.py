"""What a sampler says of itself."""

from __future__ import annotations

from tests.integration.service.api.calls import a_sampler, ok
from tests.integration.service.api.running import MODEL, TINY, RunningServer
from tinsmith.wire.endpoints import ENDPOINTS


def test_a_sampler_names_its_tokenizer() -> None:
    """Its model's name is not enough where the model came from a folder."""
    with RunningServer() as server, server.http() as http:
        sampler = a_sampler(http)

        told = ok(http.get(ENDPOINTS["get_sampler"].path.format(sampler_id=sampler)))

        assert (told["base_model"], told["tokenizer_id"]) == (MODEL, TINY.tokenizer_id)
