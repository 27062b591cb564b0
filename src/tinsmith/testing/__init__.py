"""Test your own training loops: a Tinker service in memory that records, computes and fails.

    from tinsmith.testing import running_service

    with running_service(long_poll_s=1.0) as service:
        service.faults.add(on="asample", times=2, status=429)
        client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
        ...
        assert len(service.requests("asample")) == 3

The service is the real one: its HTTP server, its API, its scheduler, a ledger in memory and the
fake engine. `import tinsmith` does not load this package.
"""

from tinsmith.service.api.api_call import StreamedReply
from tinsmith.testing.faults import CommandFault, ExchangeFault, Faults
from tinsmith.testing.holds import Hold
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.scripted_settings import ScriptedServiceSettings
from tinsmith.testing.service import ScriptedService, running_service

__all__ = [
    "running_service",
    "ScriptedService",
    "ScriptedServiceSettings",
    "ReceivedRequest",
    "Faults",
    "ExchangeFault",
    "CommandFault",
    "Hold",
    "StreamedReply",
]
