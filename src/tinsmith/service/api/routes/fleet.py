"""The replicas of the engine, for operators.

`app.py` answers whoever is not one as if these routes did not exist: replicas hold the models of
all tenants.
"""

from __future__ import annotations

from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.ledger import replicas
from tinsmith.types.extensions import FleetResponse, ReplicaStatus


async def list_replicas(call: ApiCall) -> FleetResponse:
    """The replicas, what they hold, their load and their losses."""
    return FleetResponse(replicas=await replicas.list_replicas(call.ledger))


async def drain_replica(call: ApiCall) -> ReplicaStatus:
    """Have everything moved off a replica, and close it. Nothing fails."""
    return await replicas.ask_drained(call.ledger, call.request.name, is_drained=True)


async def resume_replica(call: ApiCall) -> ReplicaStatus:
    """Have a drained replica used again."""
    return await replicas.ask_drained(call.ledger, call.request.name, is_drained=False)


HANDLERS: dict[str, Handler] = {
    "list_replicas": list_replicas,
    "drain_replica": drain_replica,
    "resume_replica": resume_replica,
}
