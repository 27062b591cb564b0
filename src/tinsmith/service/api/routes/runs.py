"""Training runs, listed and shown."""

from __future__ import annotations

from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import Projects, check_page, of_tenant, shown_run
from tinsmith.service.ledger.records import ModelEntry
from tinsmith.types.checkpoints import Cursor
from tinsmith.types.requests import ListTrainingRunsRequest
from tinsmith.types.runs import TrainingRun, TrainingRunsResponse


async def list_training_runs(call: ApiCall) -> TrainingRunsResponse:
    """A page of the tenant's runs, newest first, of one project if asked for."""
    request: ListTrainingRunsRequest = call.request
    check_page(request.limit, request.offset)
    models = call.ledger.entries(ModelEntry)
    if request.project_id is None:
        total = await models.count(tenant_id=call.tenant_id)
        page = await models.of_tenant(call.tenant_id, limit=request.limit, offset=request.offset)
    else:
        projects = Projects(call.ledger)
        found = [
            model
            async for model in of_tenant(models, call.tenant_id)
            if await projects.of_run(model) == request.project_id
        ]
        total = len(found)
        page = found[request.offset : request.offset + request.limit]
    return TrainingRunsResponse(
        training_runs=[await shown_run(call.ledger, model) for model in page],
        cursor=Cursor(offset=request.offset, limit=request.limit, total_count=total),
    )


async def get_training_run(call: ApiCall) -> TrainingRun:
    """One run."""
    model = await call.context.lookups.model(call.tenant_id, call.request.training_run_id)
    return await shown_run(call.ledger, model)


HANDLERS: dict[str, Handler] = {
    "list_training_runs": list_training_runs,
    "get_training_run": get_training_run,
}
