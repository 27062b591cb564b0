"""Traces the files and functions that one training call and one sample pass through.

    scripts/trace-road [--functions] [--json]

Runs a real service with a tiny random model, its engine and a client over HTTP, all in one process,
and records every Python function of the package that is called between the user's line and its
result, in order. A similar call is made before, so that start-up is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "src" / "tinsmith"
MODEL = "tiny"
WAIT_S = 120.0
SETTLE_S = 0.5
"""Until the service has finished what follows a result: settling, snapshots, idle loops."""

Road = list[tuple[str, str]]
"""Files and functions in the order in which they were entered, each as often as it was."""


class Tracer:
    """Records the functions of the package that any thread enters, in order."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, str]] = []
        self._is_recording = False
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_recording and event == "call":
            self._entered.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def record(self, warm_up: Callable[[], Any], call: Callable[[], Any]) -> Road:
        """The road of a call, after a similar one."""
        warm_up()
        time.sleep(SETTLE_S)
        self._entered.clear()
        self._is_recording = True
        try:
            call()
        finally:
            self._is_recording = False
        return [
            (pathlib.Path(file).relative_to(PACKAGE).as_posix(), function)
            for file, function in list(self._entered)
            if pathlib.Path(file).is_relative_to(PACKAGE)
        ]


def roads(tracer: Tracer, base_url: str) -> dict[str, Road]:
    """The road of each call, by the name of its method."""
    import tinsmith

    def sampled(first: int) -> Any:
        prompt = tinsmith.ModelInput.from_ints([first, 6, 7])
        return sampler.sample(prompt, 1, tinsmith.SamplingParams(max_tokens=4, seed=1))

    tokens = tinsmith.ModelInput.from_ints([5, 6, 7])
    datum = tinsmith.Datum(tokens, {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})
    with tinsmith.ServiceClient(base_url=base_url, api_key="tml-trace") as client:
        training = client.create_lora_training_client(MODEL, rank=4)
        sampler = client.create_sampling_client(base_model=MODEL)

        def trained() -> Any:
            return training.forward_backward([datum], "cross_entropy").result(WAIT_S)

        return {
            "forward_backward": tracer.record(trained, trained),
            # Another prompt than before, or the prefix cache has it.
            "sample": tracer.record(
                lambda: sampled(5).result(WAIT_S), lambda: sampled(8).result(WAIT_S)
            ),
        }


def _show(found: dict[str, Road], *, with_functions: bool) -> None:
    for call, road in found.items():
        functions: dict[str, list[str]] = {}
        for file, function in dict.fromkeys(road):
            functions.setdefault(file, []).append(function)
        print(f"{call}: {len(functions)} files, {len(set(road))} functions")
        for file, names in functions.items():
            print(f"  {file}  {', '.join(names) if with_functions else len(names)}")


def main() -> None:
    """Trace both calls and print their roads."""
    parser = argparse.ArgumentParser(
        prog="scripts/trace-road", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--functions", action="store_true", help="name the functions")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: pairs of file and function"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(PACKAGE.parents[1]))
    from tests.numerics.small_models import make_model
    from tinsmith.service.run.lifecycle import serve
    from tinsmith.service.run.service_settings import LogSettings, ServiceSettings

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
            except Exception as exc:  # noqa: BLE001 - raised by the main thread
                outcome.append(exc)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=use, daemon=True).start()
        serve(settings)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    if arguments.json:
        print(json.dumps(outcome[0]))
    else:
        _show(outcome[0], with_functions=arguments.functions)


if __name__ == "__main__":
    main()
