"""What the scripts promise, tested with a fake Python so that nothing is installed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ROOT / ".ci/run",
    *sorted(p for p in ROOT.glob("scripts/*") if p.is_file() and not p.suffix),
]

# Responds to what the scripts ask of a Python: its version and path, a venv, pip, and tests, which
# fail. The venv's interpreter is a copy of it; the file "pip" beside pyproject.toml is run as pip.
STAND_IN = """\
#!/usr/bin/env bash
case "$*" in
  *sys.executable*) echo "$0" ;;
  *python_version*) echo "CPython VERSION" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ; echo venv >>calls ;;
  "-m pip "*) echo pip >>calls ; exec bash ./pip ;;
  "-m pytest "*) echo pytest >>calls ; exit 1 ;;
  *) exit 9 ;;
esac
"""
USE_VENV = 'set -euo pipefail; source "$1/scripts/_venv.sh"; use_venv .venv-x ""'
TIME_LIMIT_S = 300


class Checkout:
    """A checkout with the scripts, a fake Python and nothing to install."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/_venv.sh", root / "scripts")
        (root / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.ruff]\n")
        kernels = root / "src/tinsmith/engine/model/kernels"
        kernels.mkdir(parents=True)
        compiled = (kernels / name for name in ("one.c", "one.h", "library_path.py"))
        for path in (root / "constraints.txt", root / "hatch_build.py", *compiled):
            path.touch()
        self.python = root / "python-stand-in"
        self.python_is("3.11.0")
        self.pip_does("exit 0")

    def python_is(self, version: str) -> None:
        self.python.write_text(STAND_IN.replace("VERSION", version))
        self.python.chmod(0o755)

    def pip_does(self, script: str) -> None:
        (self.root / "pip").write_text(script)

    def start_use_venv(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", USE_VENV, "bash", str(self.root)],
            env={**os.environ, "PYTHON": str(self.python), **environment},
            cwd="/",
            stderr=subprocess.PIPE,
            text=True,
        )

    def use_venv(self, **environment: str) -> tuple[int, str]:
        """Run to the end; returns the exit status and stderr."""
        with self.start_use_venv(**environment) as run:
            _, said = run.communicate(timeout=TIME_LIMIT_S)
        return run.returncode, said

    def new_calls(self) -> list[str]:
        """What was created or installed since the last call."""
        calls = self.root / "calls"
        lines = calls.read_text().split() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return lines

    @property
    def stamp(self) -> Path:
        return self.root / ".venv-x/stamp"


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition in another process holds."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")  # a space, because paths have them


@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_command_is_executable_and_parses(command: Path) -> None:
    assert command.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", command], check=True)


def test_the_scripts_are_found() -> None:
    assert {"check", "regenerate-proto", "test"} <= {command.name for command in COMMANDS}


def test_an_install_shows_each_package_as_it_goes(checkout: Checkout) -> None:
    checkout.pip_does("""
echo '  Installing build dependencies: started'
echo '  Preparing editable metadata (pyproject.toml): started'
echo 'Collecting torch==2.13.0'
echo '  Downloading torch-2.13.0-cp311-cp311-linux.whl.metadata (29 kB)'
echo 'Downloading torch-2.13.0-cp311-cp311-linux.whl (175.5 MB)'
echo '  Using cached https://files/a/msgspec-0.20.0-py3-none-any.whl (212 kB)'
echo 'Processing /files/idna-3.20-py3-none-any.whl (from yarl)'
until [[ -e go ]]; do sleep 0.01; done
echo 'Installing collected packages: torch, msgspec, idna'
""")
    with checkout.start_use_venv() as run:
        assert run.stderr is not None
        said = iter(run.stderr.readline, "")
        phases = [next(line for line in said if line.startswith("    ")) for _ in range(2)]
        shown = [next(line for line in said if line.startswith("      ")) for _ in range(3)]
        (checkout.root / "go").touch()
        rest = "".join(said)

    assert [line.split(maxsplit=1)[1].strip() for line in shown] == [
        "torch-2.13.0 (175.5 MB)",
        "msgspec-0.20.0 (212 kB)",
        "idna-3.20",
    ]
    assert "build tools" in phases[0]
    assert "compiling the kernels" in phases[1]
    assert "installing 3 packages" in rest
    assert run.returncode == 0


def test_the_environment_is_created_once(checkout: Checkout) -> None:
    status, said = checkout.use_venv()
    assert status == 0, said
    assert checkout.new_calls() == ["venv", "pip"]

    _, said = checkout.use_venv()

    assert "up to date" in said
    assert checkout.new_calls() == []


@pytest.mark.parametrize(
    "changed", ["constraints.txt", "hatch_build.py", "src/tinsmith/engine/model/kernels/one.c"]
)
def test_changed_pins_and_kernels_update_the_environment(checkout: Checkout, changed: str) -> None:
    checkout.use_venv()
    checkout.new_calls()
    (checkout.root / changed).write_text("msgspec==0.20.0\n")

    checkout.use_venv()

    assert checkout.new_calls() == ["pip"]


def test_changed_linter_settings_do_not_update_the_environment(checkout: Checkout) -> None:
    checkout.use_venv()
    checkout.new_calls()
    with (checkout.root / "pyproject.toml").open("a") as pyproject:
        pyproject.write("line-length = 80\n")

    checkout.use_venv()

    assert checkout.new_calls() == []


def test_another_python_recreates_the_environment(checkout: Checkout) -> None:
    checkout.use_venv()
    checkout.new_calls()

    checkout.python_is("3.12.0")
    checkout.use_venv()

    assert checkout.new_calls() == ["venv", "pip"]


def test_after_a_failed_install_the_environment_is_recreated(checkout: Checkout) -> None:
    checkout.pip_does("exit 1")
    status, _ = checkout.use_venv()
    assert status != 0
    assert not checkout.stamp.exists()
    checkout.new_calls()
    checkout.pip_does("exit 0")

    checkout.use_venv()

    assert checkout.new_calls() == ["venv", "pip"]
    assert checkout.stamp.exists()


def test_failed_update_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.use_venv()
    (checkout.root / "constraints.txt").write_text("msgspec==0.20.0\n")
    checkout.pip_does("exit 1")

    status, _ = checkout.use_venv()

    assert status != 0
    assert not checkout.stamp.exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="runs are kept apart by flock")
def test_the_second_of_two_runs_waits_for_the_first(checkout: Checkout) -> None:
    checkout.pip_does("until [[ -e go ]]; do sleep 0.02; done")
    first = checkout.start_use_venv()
    wait_until((checkout.root / "calls").exists)
    second = checkout.start_use_venv()
    assert second.stderr is not None
    assert "another run is installing" in second.stderr.readline()

    (checkout.root / "go").touch()

    first.communicate(timeout=TIME_LIMIT_S)
    _, rest = second.communicate(timeout=TIME_LIMIT_S)
    assert [first.returncode, second.returncode] == [0, 0], rest
    assert checkout.new_calls() == ["venv", "pip"]


def test_a_failing_test_fails_the_run_and_is_not_run_again(checkout: Checkout) -> None:
    """A test that passes the second time is still broken."""
    shutil.copy(ROOT / "scripts/test", checkout.root / "scripts")
    check = checkout.root / "scripts/check"
    check.write_text("#!/usr/bin/env bash\n")
    check.chmod(0o755)

    done = subprocess.run(
        [checkout.root / "scripts/test"],
        env={**os.environ, "PYTHON": str(checkout.python)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert checkout.new_calls() == ["venv", "pip", "pytest"]
    assert "all good" not in done.stderr


def test_an_unusable_python_is_reported_by_name(checkout: Checkout) -> None:
    status, said = checkout.use_venv(PYTHON="/no/such/python")

    assert status != 0
    assert "PYTHON=/no/such/python is not a working Python >= 3.11" in said


def test_missing_python_is_explained(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "git", "awk", "cat", "flock"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)

    status, said = checkout.use_venv(PYTHON="", PATH=str(tools))

    assert status != 0
    assert "no Python >= 3.11" in said
