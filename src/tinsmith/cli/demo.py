"""`tinsmith demo`: a real model learns two things on this machine, and a crash loses nothing."""

from __future__ import annotations

from tinsmith.cli.parser import Parser
from tinsmith.cli.serve import add_settings
from tinsmith.serve.options import BY_NAME

TYPE_CHECKING = False  # loading `typing` takes longer than all of a help
if TYPE_CHECKING:
    import argparse
    from pathlib import Path

EPILOG = """\
It starts a service of its own on a free port, trains SmolLM2-135M-Instruct (fetched on first use,
about 100 MB) in about five minutes on two cores, and leaves a page with the curves, and with
matplotlib installed a picture of them. Two runs with one seed agree.
"""


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.set_defaults(run=run)
    parser.epilog = EPILOG
    parser.add_argument("--quick", action="store_true", help="fewer steps and questions")
    parser.add_argument("--seed", type=int, default=0, help="the random seed (default: 0)")
    parser.add_argument(
        "--out",
        default="tinsmith-demo",
        metavar="DIR",
        help="where the page and the data go (default: tinsmith-demo)",
    )
    parser.add_argument("--model", default=None, metavar="NAME_OR_DIR", help="another base model")
    add_settings(parser, (BY_NAME["data"],))


def run(arguments: argparse.Namespace) -> None:
    """Run it."""
    import shutil
    from pathlib import Path

    from tinsmith.cli.local_models import model_cache, telling
    from tinsmith.demo.program import DATA, DemoSettings, run_demo
    from tinsmith.model_files.find import find_model
    from tinsmith.model_files.sources import DEFAULT_MODEL
    from tinsmith.observe.progress import Progress

    _check_installed()
    out = Path(arguments.out).absolute()
    _check_writable(out)
    name = arguments.model or DEFAULT_MODEL
    with Progress(name, None, in_bytes=True, format_=arguments.format) as bar:
        folder = find_model(name, model_cache(arguments), tell=telling(bar, name))
    if Path(name).is_dir():
        name = folder.name  # a path cannot be what a service calls a model
    shutil.rmtree(out / DATA, ignore_errors=True)  # of an earlier demo
    run_demo(
        DemoSettings(
            model=name,
            folder=folder,
            out=out,
            is_quick=arguments.quick,
            seed=arguments.seed,
        )
    )


def _check_writable(out: Path) -> None:
    """Before minutes of work whose results could not be kept."""
    import tempfile

    from tinsmith.cli.failures import CommandError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as exc:
        raise CommandError(
            f"{out} cannot be written to: {exc.strerror or exc}",
            remedy="name another folder with --out",
        ) from exc


def _check_installed() -> None:
    """Before a model is fetched that could not be used."""
    from importlib.util import find_spec

    from tinsmith.cli.failures import CommandError

    for package in ("torch", "gguf"):
        if find_spec(package) is None:
            raise CommandError(
                f"the demo needs {package}, which is not installed",
                remedy="pip install 'tinsmith[demo]'",
            )
