"""The official SDK's management calls, as a program of its own; its sockets outlive it."""

from __future__ import annotations

import datetime
import json
import sys
import warnings
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")


def main(base_url: str, api_key: str, run: str, session: str) -> None:
    """Call everything once and print what came back."""
    rest = tinker.RestClient(base_url=base_url, api_key=api_key)
    admin = tinker.AdminClient(base_url=base_url, api_key=api_key)
    path = f"tinker://{run}/weights/c"
    export = f"tinker://{run}/external_weights/e"
    hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    seen: dict[str, Any] = {}

    def told(name: str, future: Any) -> Any:
        value = future.result(timeout=30)
        plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        seen[name] = plain
        return value

    told("run", rest.get_training_run(run))
    told("run_by_path", rest.get_training_run_by_tinker_path(path))
    told("runs", rest.list_training_runs(limit=10))
    told("info", rest.get_weights_info_by_tinker_path(path))
    told("checkpoints", rest.list_checkpoints(run))
    told("mine", rest.list_user_checkpoints(limit=1000))
    told("urls", rest.get_external_weights_urls(export))
    told("publish", rest.publish_checkpoint_from_tinker_path(path))
    told("unpublish", rest.unpublish_checkpoint_from_tinker_path(path))
    told("ttl", rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    copied = told("copy", rest.copy_weights(path, "project"))
    told("delete_copy", rest.delete_checkpoint_from_tinker_path(copied))
    told("session", rest.get_session(session))
    told("sessions", rest.list_sessions())
    told("project", rest.assign_session_project(session, "project"))
    told("trace", rest.export_session_trace(session))
    told("search", rest.search_sessions(types.SessionSearchRequest(display_name="name")))
    told("audit", admin.get_audit_log())
    told("usage", admin.get_billing_usage(hour, hour + datetime.timedelta(hours=1)))
    told("storage", admin.get_current_checkpoint_storage_usage())
    print(json.dumps(seen, default=str), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
