"""Test your own training loops: a Tinker service in memory that records, computes and fails.

    from tinsmith.testing import running_service

    with running_service(long_poll_s=1.0) as service:
        service.faults.add(on="asample", times=2, status=429)
        client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
        ...
        assert len(service.requests("asample")) == 3

No network is trained: `arithmetic.py` says which formula stands for it. `import tinsmith` does not
load this package.
"""

from tinsmith.testing.faults import CommandFault, ExchangeFault, Faults
from tinsmith.testing.holds import Hold
from tinsmith.testing.http_reading import Incoming
from tinsmith.testing.http_server import BrokenReply, HttpServer, StreamedReply
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.service import ScriptedService, running_service
from tinsmith.testing.settings import ServiceSettings

__all__ = [
    "running_service",
    "ScriptedService",
    "ServiceSettings",
    "ReceivedRequest",
    "Faults",
    "ExchangeFault",
    "CommandFault",
    "Hold",
    "HttpServer",
    "Incoming",
    "StreamedReply",
    "BrokenReply",
]
