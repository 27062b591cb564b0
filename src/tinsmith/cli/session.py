"""`tinsmith session`: list sessions and export their timelines."""

from __future__ import annotations

import argparse

from tinsmith.cli.parser import Parser

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    import pathlib

EXPORT_TIMEOUT_S = 600.0


def configure(parser: Parser) -> None:
    """Add the verbs of `tinsmith session`."""
    from tinsmith.cli.run import add_limit

    listing = parser.add_verb("list", "list sessions, newest first", list_sessions)
    add_limit(listing, "sessions")
    export = parser.add_verb(
        "export-trace",
        "export a session's timeline as a Perfetto trace",
        export_trace,
        " Open the file at https://ui.perfetto.dev.",
    )
    export.add_argument("session_id", help="id of the session")
    export.add_argument(
        "-o", "--output", metavar="FILE", help="output file (default: SESSION_ID.pftrace)"
    )
    export.add_argument(
        "--url-only", action="store_true", help="print the URL instead of downloading"
    )


def list_sessions(arguments: argparse.Namespace) -> None:
    """Show the newest sessions, with the number of runs and samplers of each."""
    from tinsmith.cli.connect import limit_s, rest_client, wait
    from tinsmith.cli.output import (
        Table,
        fetch_items,
        listing_title,
        page_size,
        plain_of,
        show,
    )
    from tinsmith.cli.text import MISSING

    rest = rest_client(arguments)
    pages = rest.iter_sessions(page_size=page_size(arguments.limit), timeout=limit_s(arguments))
    ids: list[str] = fetch_items(pages, arguments, "sessions")
    futures = [rest.get_session(session_id) for session_id in ids]  # concurrently
    found = [wait(future, arguments) for future in futures]
    show(
        arguments.format,
        {
            "sessions": [
                {"session_id": session_id, **plain_of(session)}
                for session_id, session in zip(ids, found, strict=True)
            ]
        },
        Table(
            listing_title(len(ids), pages.total_count, "session"),
            ["Session ID", "Name", "Training Runs", "Samplers"],
            [
                [
                    session_id,
                    session.display_name or MISSING,
                    str(len(session.training_run_ids)),
                    str(len(session.sampler_ids)),
                ]
                for session_id, session in zip(ids, found, strict=True)
            ],
        ),
    )


def export_trace(arguments: argparse.Namespace) -> None:
    """Have the service export a trace, and download it."""
    import pathlib

    from tinsmith.cli.connect import rest_client, wait
    from tinsmith.cli.output import Properties, show
    from tinsmith.cli.partial_download import safe_parts
    from tinsmith.observe.terminal import Progress, size_text

    session_id: str = arguments.session_id
    name = f"{'_'.join(safe_parts(session_id))}.pftrace"
    target = pathlib.Path(arguments.output or name)
    if target.is_dir():
        target /= name
    with Progress("Exporting the trace", None, format_=arguments.format):
        rest = rest_client(arguments)
        url = wait(rest.export_session_trace(session_id), arguments, EXPORT_TIMEOUT_S)
    if arguments.url_only:
        show(arguments.format, {"session_id": session_id, "url": url}, url)
        return
    size = _fetch(arguments, url, target)
    show(
        arguments.format,
        {"session_id": session_id, "destination": str(target), "file_size_bytes": size},
        Properties(
            "Trace exported",
            [
                ("Session ID", session_id),
                ("Saved to", str(target)),
                ("Size", size_text(size)),
            ],
        ),
    )


def _fetch(arguments: argparse.Namespace, url: str, target: pathlib.Path) -> int:
    from tinsmith.cli.fetch import Fetch, SignedUrls
    from tinsmith.cli.partial_download import PartialDownload
    from tinsmith.observe.terminal import Progress

    # Every export is a new trace, so there is nothing to resume.
    with (
        PartialDownload(target, resume=False) as staging,
        Progress("Downloading", None, in_bytes=True, format_=arguments.format) as bar,
    ):
        size = Fetch(SignedUrls(lambda: ({"trace": url}, None)), staging, bar).run()
        staging.place(staging.files / "trace")
        return size
