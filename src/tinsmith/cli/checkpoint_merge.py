"""`tinsmith checkpoint merge`: a full model, with an adapter folded into its weights."""

from __future__ import annotations

import argparse
import pathlib
import tempfile

from tinsmith.checkpoints.format import Adapter
from tinsmith.checkpoints.imported import read_foreign
from tinsmith.cli.checkpoint_download import download
from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.failures import require_numpy
from tinsmith.cli.local_models import model_cache, telling
from tinsmith.cli.output import Properties, show
from tinsmith.cli.staging import Staging, exists_already
from tinsmith.model_files.find import find_model
from tinsmith.model_files.merged import merge_adapter
from tinsmith.observe.progress import Progress
from tinsmith.observe.sizes import size_text
from tinsmith.types.runs import WeightsInfoResponse

PATH = "tinker://"


def run(arguments: argparse.Namespace) -> None:
    """Merge a checkpoint of a service, or an adapter's folder.

    Raises:
        CommandError: The target exists, or numpy is not there.
        TinkerError: Something is not as it has to be; nothing is left of the target then.
    """
    target = pathlib.Path(arguments.output)
    if target.exists() and not arguments.force:
        raise exists_already(target)
    require_numpy("merging")
    adapter = _adapter(arguments)
    name = arguments.base_model or adapter.base_model
    with (
        Progress(name, None, in_bytes=True, format_=arguments.format) as bar,
        Staging(target, resume=False) as staging,
    ):
        base = find_model(name, model_cache(arguments), tell=telling(bar, name))
        card = _card(arguments.checkpoint, name)
        merge_adapter(base, adapter, staging.files, tell=telling(bar, str(target)), card=card)
        size = sum(path.stat().st_size for path in staging.files.iterdir())
        staging.place(staging.files, replace=arguments.force)
    plain = {
        "checkpoint": arguments.checkpoint,
        "base_model": name,
        "destination": str(target),
        "file_size_bytes": size,
    }
    pairs = [
        ("Checkpoint", arguments.checkpoint),
        ("Base Model", name),
        ("Layers Changed", str(len(adapter.layers))),
        ("Total Size", size_text(size)),
        ("Merged to", str(target)),
    ]
    show(arguments.format, plain, Properties("Checkpoint merged", pairs))


def _adapter(arguments: argparse.Namespace) -> Adapter:
    """The adapter of a checkpoint, which is downloaded, or of a folder."""
    path = arguments.checkpoint
    if not path.startswith(PATH):
        return read_foreign(pathlib.Path(path), base_model=arguments.base_model)
    info: WeightsInfoResponse = wait(
        rest_client(arguments).get_weights_info_by_tinker_path(path), arguments
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "adapter"
        # The options of `download` that this command does not have.
        arguments.connections, arguments.use = 8, "vllm"
        download(arguments, path, folder, resume=False)
        return read_foreign(folder, base_model=info.base_model)


def _card(checkpoint: str, base_model: str) -> str:
    return f"""\
---
base_model: {base_model}
tags:
- tinker
---

# {base_model}, fine-tuned

The LoRA adapter `{checkpoint}` is folded into the weights.
The model is loaded as its base model is.
"""
