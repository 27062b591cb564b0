"""What holds for all tests: threads that give way, time to spare, a quick collector, and Ctrl-C.

Tests of what many threads do run twice: as usual, and with threads that always give way.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Two threads of torch on two cores wait for each other by spinning: beside another program, such
# as the other half of these tests, a computation then takes ten to forty times as long. It is read
# when torch is loaded, here and in processes that tests start; no number depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# On a busy machine any example may take longer than the fifth of a second that Hypothesis allows.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

CONCURRENT = re.compile(r"test_s(1|3|5|10|11|12|14|15|16|17|18|22|32|35|36|44)_")
"""The requirements that are about threads and order (S44)."""
EAGER_S = 1e-6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each such test a second run; one that is always eager has one."""
    is_eager = any(
        "eager_switching" in mark.args for mark in metafunc.definition.iter_markers("usefixtures")
    )
    if CONCURRENT.match(metafunc.function.__name__) and not is_eager:
        metafunc.fixturenames.append("switching")
        metafunc.parametrize("switching", ["usual", "eager"], indirect=True)


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start, also when the tests themselves were started with `&`.

    A shell that starts something in the background has it ignore Ctrl-C, and whatever that starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let the collector leave alone what stays for the whole run.

    Thousands of tests and what they import are a million objects, and hundreds of tests collect.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads give way after every few instructions, so that races show (S44)."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(EAGER_S)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def switching(request: pytest.FixtureRequest) -> None:
    """How readily threads give way to each other."""
    if request.param == "eager":
        request.getfixturevalue("eager_switching")
