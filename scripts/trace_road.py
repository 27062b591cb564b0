"""Which files and functions one training call and one sample pass through, client and service.

    scripts/trace-road [--functions]

Runs a real service with a tiny random model, its engine and a client over HTTP, all in one process,
and records every Python function of the package that is called between the user's line and its
result. Each call is made once before, so that what happens only at the first is not counted.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "src" / "tinsmith"
MODEL = "tiny"
WAIT_S = 120.0


class Tracer:
    """Notes the package's functions that any thread enters while it records."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self._is_recording = False
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_recording and event == "call":
            self.seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    def record(self, call: Callable[[], Any]) -> dict[str, list[str]]:
        """The functions of a call by file, in the package alone."""
        call()
        self.seen.clear()
        self._is_recording = True
        try:
            call()
        finally:
            self._is_recording = False
        found: dict[str, list[str]] = {}
        for file, function in sorted(self.seen):
            if pathlib.Path(file).is_relative_to(PACKAGE):
                found.setdefault(str(pathlib.Path(file).relative_to(PACKAGE)), []).append(function)
        return found


def roads(tracer: Tracer, base_url: str) -> dict[str, dict[str, list[str]]]:
    """What each call passes through."""
    import tinsmith

    tokens = tinsmith.ModelInput.from_ints([5, 6, 7])
    datum = tinsmith.Datum(tokens, {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})
    with tinsmith.ServiceClient(base_url=base_url, api_key="tml-trace") as client:
        training = client.create_lora_training_client(MODEL, rank=4)
        sampler = client.create_sampling_client(base_model=MODEL)
        params = tinsmith.SamplingParams(max_tokens=4, seed=1)
        return {
            "forward_backward": tracer.record(
                lambda: training.forward_backward([datum], "cross_entropy").result(WAIT_S)
            ),
            "sample": tracer.record(lambda: sampler.sample(tokens, 1, params).result(WAIT_S)),
        }


def _show(found: dict[str, dict[str, list[str]]], *, with_functions: bool) -> None:
    for call, files in found.items():
        count = sum(map(len, files.values()))
        print(f"{call}: {len(files)} files, {count} functions")
        for file, functions in files.items():
            print(f"  {file}  {', '.join(functions) if with_functions else len(functions)}")


def main() -> None:
    """Trace both calls and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="name them, not only their number")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PACKAGE.parents[1]))
    from tests.numerics.small_models import make_model
    from tinsmith.serve.lifecycle import serve
    from tinsmith.serve.settings import LogSettings, ServiceSettings

    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        model = pathlib.Path(folder) / "model"
        model.mkdir()
        make_model(model)
        settings = ServiceSettings(
            port=port,
            data=pathlib.Path(folder) / "data",
            models=(f"{MODEL}={model}",),
            engine_process=False,
            log=LogSettings(level="error"),
        )
        probe.close()
        tracer = Tracer()
        outcome: list[Any] = []

        def use() -> None:
            try:
                outcome.append(roads(tracer, f"http://127.0.0.1:{port}"))
            except Exception as exc:  # noqa: BLE001 - shown by the main thread, which has to end first
                outcome.append(exc)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=use, daemon=True).start()
        serve(settings)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    _show(outcome[0], with_functions=arguments.functions)


if __name__ == "__main__":
    main()
