"""`tinsmith demo`: train a real model on this machine, and kill the service on the way."""

from __future__ import annotations

from tinsmith.cli.parser import Parser
from tinsmith.cli.serve import add_settings
from tinsmith.service.run.options import BY_NAME

TYPE_CHECKING = False  # importing `typing` takes longer than printing help
if TYPE_CHECKING:
    import argparse
    from pathlib import Path

EPILOG = """\
The demo starts a service on a free port and trains SmolLM2-135M-Instruct, which it downloads on
first use (about 100 MB). It takes about five minutes on two cores and writes an HTML report, and a
PNG picture of the curves if matplotlib is installed. The same seed gives the same results.

example: tinsmith demo --quick --out /tmp/demo
"""


def configure(parser: Parser) -> None:
    """Add the options of `tinsmith demo`."""
    parser.set_defaults(run=run)
    parser.epilog = EPILOG
    parser.add_argument("--quick", action="store_true", help="run fewer steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--out",
        default="tinsmith-demo",
        metavar="DIR",
        help="folder for the report and the service's data (default: tinsmith-demo)",
    )
    parser.add_argument(
        "--model",
        default=None,
        metavar="NAME_OR_DIR",
        help="base model (default: SmolLM2-135M-Instruct)",
    )
    add_settings(parser, (BY_NAME["data"],))


def run(arguments: argparse.Namespace) -> None:
    """Fetch the model if needed, and run the demo."""
    import shutil
    from pathlib import Path

    from tinsmith.cli.model import model_cache, progress_callback
    from tinsmith.demo.walkthrough import DATA, QUICK, DemoSettings, run_demo
    from tinsmith.engine.files.find import find_model
    from tinsmith.engine.files.sources import DEFAULT_MODEL
    from tinsmith.observe.terminal import Progress

    _check_installed()
    out = Path(arguments.out).absolute()
    _check_writable(out)
    name = arguments.model or DEFAULT_MODEL
    with Progress(name, None, in_bytes=True, format_=arguments.format) as bar:
        folder = find_model(name, model_cache(arguments), report=progress_callback(bar, name))
    if Path(name).is_dir():
        name = folder.name  # the service needs a name, not a path
    shutil.rmtree(out / DATA, ignore_errors=True)  # left by an earlier demo
    sizes = QUICK if arguments.quick else {}
    run_demo(DemoSettings(model=name, folder=folder, out=out, seed=arguments.seed, **sizes))


def _check_writable(out: Path) -> None:
    """Fail now rather than after minutes of training."""
    import tempfile

    from tinsmith.cli.command_errors import CommandError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as exc:
        raise CommandError(
            f"cannot write to {out}: {exc.strerror or exc}",
            remedy="choose another folder with --out",
        ) from exc


def _check_installed() -> None:
    """Fail before downloading a model that could not be used."""
    from importlib.util import find_spec

    from tinsmith.cli.command_errors import CommandError

    for package in ("torch", "gguf"):
        if find_spec(package) is None:
            raise CommandError(
                f"the demo requires {package}, which is not installed",
                remedy="pip install 'tinsmith[demo]'",
            )
