"""One poll for all samples of a sampler, where the service offers it.

Instead of a long poll for each sample there is one for the sampler, which says which samples ended.
A sample that has ended is handed on, for its result to be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.client.samples.shared_poll import Asked, SharedPoll
from tinsmith.types.futures import FutureCompletion, FutureFinished, FuturesRetrieveResponse
from tinsmith.wire.endpoints import ENDPOINTS


class SessionPoller(SharedPoll[FutureCompletion]):
    """Says when the samples of one sampler and clone have ended."""

    endpoint = ENDPOINTS["retrieve_futures"]

    def _question(self, *, is_held: bool) -> dict[str, Any]:
        del is_held  # the server decides how long it holds a poll
        return {}

    def _hear(self, answer: FuturesRetrieveResponse, asked: Asked) -> bool:
        del asked
        self._cursor = answer.cursor
        self._deliver(answer.completions)
        return bool(answer.completions)

    def _deliver(self, completions: Sequence[FutureCompletion]) -> None:
        for completion in completions:
            request_id = completion.request_id
            call = self._waiting.pop(request_id, None)
            if call is not None:
                self._fetch(call, _size_of(completion))
            elif not self._unclaimed.keep(request_id, completion):
                self._retrieved[request_id] = None


def _size_of(completion: FutureCompletion) -> int | None:
    if isinstance(completion, FutureFinished):
        return completion.response_payload_uncompressed_size
    return None
