"""Get and list training runs."""

from __future__ import annotations

from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import PAGE_SIZE, ManagementClient, Pages
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.runs import AccessScope, TrainingRun, TrainingRunsResponse


class TrainingRunCalls(ManagementClient):
    """The methods of `RestClient` for training runs."""

    def get_training_run(
        self,
        training_run_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRun]:
        """Get one training run.

        Args:
            training_run_id: The id of the run.
            access_scope: `accessible` also finds runs that others share with the caller.
            timeout: Seconds to wait for the call.

        Raises:
            NotFoundError: From the future, if there is no such run.
        """
        request = r.GetTrainingRunRequest(
            training_run_id=training_run_id, access_scope=access_scope
        )
        return self._start("get_training_run", request, timeout)

    async def get_training_run_async(
        self,
        training_run_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> TrainingRun:
        """As `get_training_run`."""
        return await self.get_training_run(training_run_id, access_scope, timeout=timeout)

    def get_training_run_by_tinker_path(
        self,
        tinker_path: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRun]:
        """Get the training run that a checkpoint belongs to; otherwise as `get_training_run`.

        Raises:
            ValueError: It is not a valid checkpoint path.
        """
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        request = r.GetTrainingRunRequest(
            training_run_id=parsed.training_run_id, access_scope=access_scope
        )
        return self._start(
            "get_training_run", request, timeout, method="get_training_run_by_tinker_path"
        )

    async def get_training_run_by_tinker_path_async(
        self,
        tinker_path: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> TrainingRun:
        """As `get_training_run_by_tinker_path`."""
        return await self.get_training_run_by_tinker_path(
            tinker_path, access_scope, timeout=timeout
        )

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """A page of training runs, newest first; `iter_training_runs` lists them all."""
        request = r.ListTrainingRunsRequest(
            limit=limit, offset=offset, access_scope=access_scope, project_id=project_id
        )
        return self._start("list_training_runs", request, timeout)

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingRunsResponse:
        """As `list_training_runs`."""
        return await self.list_training_runs(
            limit, offset, access_scope, project_id, timeout=timeout
        )

    def iter_training_runs(
        self,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        page_size: int = PAGE_SIZE,
        *,
        timeout: float | None = None,
    ) -> Pages[TrainingRun]:
        """Iterate over all training runs, with `for` or `async for`; pages are fetched as needed.

        Args:
            access_scope: `accessible` also lists runs that others share with the caller.
            project_id: Only runs of this project.
            page_size: Runs per request, at most 1,000.
            timeout: Seconds to wait for each page.
        """
        return Pages(
            lambda limit, offset: self.list_training_runs(
                limit, offset, access_scope, project_id, timeout=timeout
            ),
            lambda page: (page.training_runs, page.cursor),
            page_size,
        )
