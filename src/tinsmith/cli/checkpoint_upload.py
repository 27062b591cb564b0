"""`tinsmith checkpoint upload`: an adapter that was made elsewhere, sent to a service that runs.

Where the service's own folder is at hand, `checkpoint_import.py` does the same without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tinsmith.cli.connect import rest_client, wait
from tinsmith.cli.output import Properties, show
from tinsmith.client.background import background
from tinsmith.client.management.imports import import_folder
from tinsmith.observe.progress import Progress
from tinsmith.observe.sizes import size_text
from tinsmith.types.imports import IMPORTED_FILES, FinishImportResponse

LONGEST_S = 24 * 3600.0


def run(arguments: argparse.Namespace) -> None:
    """Send the folder and show where the checkpoint is.

    Raises:
        TinkerError: There is no adapter in the folder, or the service does not take it.
    """
    folder = Path(arguments.folder)
    client = rest_client(arguments, is_record_only=False)
    files = [folder / name for name in IMPORTED_FILES]
    total = sum(file.stat().st_size for file in files if file.is_file())

    with Progress("Sending", total, in_bytes=True, format_=arguments.format) as progress:

        async def work() -> FinishImportResponse:
            session = client.holder.session
            await session.ready()
            return await import_folder(
                session,
                folder,
                arguments.name,
                base_model=arguments.base_model,
                project_id=arguments.project,
                ttl_seconds=arguments.ttl,
                sent=progress.add,
            )

        done = wait(background().start(work(), "upload", None), arguments, LONGEST_S)
    pairs = [
        ("Checkpoint Path", done.tinker_path),
        ("Base Model", done.base_model),
        ("LoRA Rank", str(done.lora_rank)),
        ("Size", size_text(done.size_bytes)),
    ]
    show(arguments.format, done.model_dump(mode="json"), Properties("Checkpoint uploaded", pairs))
