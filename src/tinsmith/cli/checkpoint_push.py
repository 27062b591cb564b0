"""`tinsmith checkpoint push-hf`: upload a checkpoint's adapter to the Hugging Face Hub.

Requires the package `huggingface_hub`, which is not a dependency of tinsmith, and a login with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import re
import tempfile
from typing import Any

from tinsmith.cli.checkpoint_download import download
from tinsmith.cli.command_errors import CommandError
from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.output import Properties, show
from tinsmith.cli.text import yes_or_no
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.runs import WeightsInfoResponse

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CARD = "README.md"
NOT_UPLOADED = "checkpoint_complete"
"""A marker that services leave beside the files."""


def push(arguments: argparse.Namespace) -> None:
    """Download a checkpoint and upload it.

    Raises:
        CommandError: It is not an adapter, the Hub cannot be used, or the repository has another
            checkpoint.
    """
    path = arguments.checkpoint_path
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    hub = _hub()
    info: WeightsInfoResponse = wait(
        rest_client(arguments, is_record_only=False).get_weights_info_by_tinker_path(path),
        arguments,
    )
    repository = arguments.repo or hub_name(
        f"tinker-{info.base_model.rpartition('/')[2]}-{parsed.training_run_id}"
    )
    revision = arguments.revision
    if revision is None and arguments.repo is None:
        revision = hub_name(parsed.checkpoint_id)
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "adapter"
        # Options of `download` that this command does not have.
        arguments.force, arguments.connections = False, 8
        download(arguments, path, folder, resume=False)
        _check_adapter(folder)
        _name_base_model(folder / CONFIG, info.base_model)
        if not arguments.no_model_card and not (folder / CARD).exists():
            (folder / CARD).write_text(model_card(path, repository, info), encoding="utf-8")
        repository, revision = _upload(hub, arguments, folder, repository, revision)
    plain = {
        "checkpoint_path": path,
        "repo_id": repository,
        "revision": revision,
        "public": arguments.public,
    }
    pairs = [
        ("Checkpoint Path", path),
        ("Repo ID", repository),
        ("Revision", revision or "main"),
        ("Public", yes_or_no(arguments.public)),
    ]
    show(arguments.format, plain, Properties("Checkpoint uploaded", pairs))


def _hub() -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as exc:
        raise CommandError(
            "pushing to the Hub requires the package huggingface_hub",
            remedy="run `pip install huggingface_hub`, then `hf auth login`",
        ) from exc
    try:
        hub.HfApi().whoami()
    except _hub_errors() as exc:
        raise CommandError(
            f"the Hub refused the login: {_first_line(exc)}", remedy="run `hf auth login`"
        ) from exc
    return hub


def _hub_errors() -> tuple[type[Exception], ...]:
    """The errors that huggingface_hub raises: its own, and those of its HTTP library."""
    own: type[Exception] = importlib.import_module("huggingface_hub.errors").HfHubHTTPError
    family = [cls for cls in own.__mro__ if cls.__name__ == "HTTPError"]
    return (OSError, ValueError, own, *family)


def _not_found_errors() -> tuple[type[Exception], ...]:
    """The errors that huggingface_hub raises for a missing file, branch or repository."""
    errors = importlib.import_module("huggingface_hub.errors")
    return (
        *(errors.EntryNotFoundError, errors.RevisionNotFoundError),
        errors.RepositoryNotFoundError,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _check_adapter(folder: pathlib.Path) -> None:
    has_weights = any((folder / name).exists() for name in WEIGHTS)
    if not (folder / CONFIG).exists() or not has_weights:
        raise CommandError(
            f"the checkpoint has no adapter: expected {CONFIG} and {' or '.join(WEIGHTS)}",
            remedy="weights exported with encryption cannot be uploaded",
        )


def _name_base_model(config: pathlib.Path, base_model: str) -> None:
    """Replace a folder on the service's machine by the name of the base model."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    named = fields.get("base_model_name_or_path")
    if not isinstance(named, str) or pathlib.PurePath(named).is_absolute():
        fields["base_model_name_or_path"] = base_model
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _upload(
    hub: Any,
    arguments: argparse.Namespace,
    folder: pathlib.Path,
    repository: str,
    revision: str | None,
) -> tuple[str, str | None]:
    api = hub.HfApi()
    try:
        made = api.create_repo(repo_id=repository, private=not arguments.public, exist_ok=True)
        repository = getattr(made, "repo_id", repository)
        if revision is not None:
            api.create_branch(repo_id=repository, branch=revision, exist_ok=True)
        _check_same(hub, arguments.checkpoint_path, repository, revision)
        ignored = [*arguments.ignore_pattern]
        if not arguments.allow_pattern:
            ignored.append(NOT_UPLOADED)
        api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            revision=revision,
            commit_message=arguments.commit_message,
            create_pr=arguments.create_pr,
            allow_patterns=arguments.allow_pattern or None,
            ignore_patterns=ignored or None,
        )
    except _hub_errors() as exc:
        raise CommandError(f"the upload to the Hub failed: {_first_line(exc)}") from exc
    return repository, revision


def _check_same(hub: Any, path: str, repository: str, revision: str | None) -> None:
    """Refuse a repository that contains another checkpoint."""
    try:
        file = hub.hf_hub_download(repo_id=repository, filename=CARD, revision=revision)
    except _not_found_errors():
        return
    except _hub_errors() as exc:
        raise CommandError(
            f"could not read {repository}: {_first_line(exc)}",
            remedy="nothing was uploaded; retry",
        ) from exc
    text = pathlib.Path(file).read_text(encoding="utf-8", errors="replace")
    named = re.search(r"tinker://[^\s`]+", text)
    if named is not None and named[0] != path:
        raise CommandError(
            f"{repository} contains another checkpoint, {named[0]}",
            remedy="choose another repository with --repo, or another branch with --revision",
        )


def hub_name(text: str) -> str:
    """The text as a valid Hub name: letters, digits, and single `-`, `_` and `.`."""
    return re.sub(r"-{2,}", "-", re.sub(r"[^\w.-]", "-", text, flags=re.ASCII)).strip("-_.")


def model_card(path: str, repository: str, info: WeightsInfoResponse) -> str:
    """The README.md of the adapter's repository."""
    trained = {
        "attention": info.train_attn,
        "feed-forward": info.train_mlp,
        "output": info.train_unembed,
    }
    layers = ", ".join(name for name, is_trained in trained.items() if is_trained) or "unknown"
    return f"""\
---
base_model: {info.base_model}
library_name: peft
tags:
- tinker
- peft
- lora
- base_model:adapter:{info.base_model}
tinker_path: {path}
---

# A LoRA adapter for {info.base_model}

Trained with the Tinker API; uploaded from `{path}`.

| | |
|---|---|
| rank | {info.lora_rank or "unknown"} |
| layers | {layers} |

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{repository}")
```
"""
