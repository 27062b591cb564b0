"""The demo from its first line to its last: three parts, told as they happen, and a page."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo.crash import compare_runs
from tinsmith.demo.curves import Curve, Rows, bars, page
from tinsmith.demo.picture import can_draw, draw
from tinsmith.demo.reinforcement import GROUP, Rewarded, learn_to_the_point
from tinsmith.demo.service import Service
from tinsmith.demo.supervised import Learned, learn_json
from tinsmith.demo.tasks import Example

PAGE = "demo.html"
PICTURE = "demo.png"
DATA = "demo-data"
"""The service's folder. Each demo deletes that of the one before, and so it is named for that."""
SHOWN = 64
"""Letters of an answer on the screen, which has 80 columns."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much is shown."""

    model: str
    folder: Path
    """Where the model's files are."""
    out: Path
    """Where page and picture go, and the data of the service, which are left for a look."""
    is_quick: bool = False
    seed: int = 0

    @property
    def json_steps(self) -> int:
        """Steps of learning from examples."""
        return 4 if self.is_quick else 10

    @property
    def reward_steps(self) -> int:
        """Steps of learning from rewards."""
        return 3 if self.is_quick else 10

    @property
    def questions(self) -> int:
        """How many are asked in each of them."""
        return 2 if self.is_quick else 4

    @property
    def tests(self) -> int:
        """How many sentences are asked before and after."""
        return 3 if self.is_quick else 6


def run_demo(settings: DemoSettings) -> Path:
    """Run all of it; where the page is.

    Raises:
        TinkerError: The service could not be started, or something failed in it.
    """
    started = time.monotonic()
    service = Service(settings.out / DATA, f"{settings.model}={settings.folder}")
    _say(f"Starting `tinsmith serve` with {settings.model} (its log: {service.log})")
    with _client_log(), service, ServiceClient(base_url=service.url, api_key="tml-demo") as client:
        _say(f"  ready after {time.monotonic() - started:.1f} s")
        learned = _examples(client, settings)
        rewarded = _rewards(client, settings)
        sentence = _crash(client, service, settings)
    took = f"All of it took {time.monotonic() - started:.0f} s."
    settings.out.mkdir(parents=True, exist_ok=True)
    written = settings.out / PAGE
    written.write_text(_page(settings, learned, rewarded, [sentence, took]), encoding="utf-8")
    _say(f"\n{took} The curves and answers are in {written}")
    _draw(settings, learned, rewarded)
    return written


@contextlib.contextmanager
def _client_log() -> Iterator[None]:
    """Show what the client warns of, such as a long wait, as a part of the demo."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("   the client's log: %(message)s"))
    log = logging.getLogger("tinsmith")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _examples(client: ServiceClient, settings: DemoSettings) -> Learned:
    _say(f"\n1. Learning from examples: sentences to JSON, {settings.json_steps} steps")
    learned = learn_json(
        client,
        settings.model,
        steps=settings.json_steps,
        tests=settings.tests,
        seed=settings.seed,
        told=lambda losses: _progress("loss", losses, settings.json_steps),
    )
    _say("")
    _say_answers(learned.test, learned.before, learned.after)
    right = f"{learned.right(learned.before)} before, {learned.right(learned.after)} after"
    _say(f"   right answers, of {len(learned.test)} about people in no example: {right}")
    return learned


def _rewards(client: ServiceClient, settings: DemoSettings) -> Rewarded:
    size = f"{settings.reward_steps} steps of {settings.questions} questions, {GROUP} answers each"
    _say(f"\n2. Learning from rewards: answers to the point, {size}")
    rewarded = learn_to_the_point(
        client,
        settings.model,
        steps=settings.reward_steps,
        questions=settings.questions,
        seed=settings.seed,
        told=lambda rewards: _progress("reward", rewards, settings.reward_steps),
    )
    _say("")
    _say_answers(rewarded.questions, rewarded.before, rewarded.after)
    first, last = rewarded.rewards[0], rewarded.rewards[-1]
    _say(f"   mean reward of the answers: {first:.2f} in the first step, {last:.2f} in the last")
    return rewarded


def _crash(client: ServiceClient, service: Service, settings: DemoSettings) -> str:
    _say("\n3. The same training run twice; in the second one the service is killed (kill -9)")

    def kill() -> None:
        service.kill()
        _say("   killed, with three steps under way; it starts again, and first runs the commands")
        _say("   of all three parts once more whose outcome it has not kept on disk")
        _say(f"   ready after {service.start():.1f} s")

    found = compare_runs(client, settings.model, seed=settings.seed, kill=kill)
    for name, losses in (("left alone", found.left_alone), ("killed", found.killed)):
        _say(f"   {name:<11} loss {'  '.join(f'{loss:.6f}' for loss in losses)}")
    if found.left_alone == found.killed:
        sentence = "The run whose service was killed gave the same numbers to the last bit."
    else:
        gap = max(abs(a - b) for a, b in zip(found.left_alone, found.killed, strict=True))
        sentence = f"The two runs differ by up to {gap:g} in the loss."
    _say(f"   {sentence}")
    return sentence


def _page(settings: DemoSettings, learned: Learned, rewarded: Rewarded, lines: list[str]) -> str:
    examples = [
        (example.question, before, after)
        for example, before, after in zip(learned.test, learned.before, learned.after, strict=True)
    ]
    answers = [
        (question.question, before, after)
        for question, before, after in zip(
            rewarded.questions, rewarded.before, rewarded.after, strict=True
        )
    ]
    loss, reward = _curves(learned, rewarded)
    return page(
        f"tinsmith demo: {settings.model}",
        lines,
        [
            loss,
            Rows("Sentences to JSON", ("asked", "before", "after"), examples),
            reward,
            Rows("Answers to the point", ("asked", "before", "after"), answers),
        ],
    )


def _draw(settings: DemoSettings, learned: Learned, rewarded: Rewarded) -> None:
    if not can_draw():
        _say("For a picture of the curves beside it: pip install matplotlib, and run it again.")
        return
    picture = settings.out / PICTURE
    draw(f"tinsmith demo: {settings.model}", _curves(learned, rewarded), picture)
    _say(f"The curves as a picture: {picture}")


def _curves(learned: Learned, rewarded: Rewarded) -> tuple[Curve, Curve]:
    return (
        Curve("Learning from examples", "loss of a token", learned.losses),
        Curve("Learning from rewards", "mean reward of the answers", rewarded.rewards),
    )


def _progress(name: str, values: list[float], steps: int) -> None:
    line = f"   step {len(values):>2}/{steps}  {name} {values[-1]:.3f}  {bars(values)}"
    end = "" if sys.stdout.isatty() and len(values) < steps else "\n"
    # On a terminal the line grows in its place; in a file each step has its own.
    print(f"\r{line}" if sys.stdout.isatty() else line, end=end, flush=True)  # noqa: T201


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it is what the demo is for


def _say_answers(asked: Sequence[Example], before: list[str], after: list[str]) -> None:
    for example, first, last in zip(asked, before, after, strict=True):
        _say(f"   {example.question}")
        _say(f"     before: {_short(first)}")
        _say(f"     after:  {_short(last)}")


def _short(answer: str) -> str:
    flat = " ".join(answer.split())
    return flat if len(flat) <= SHOWN else f"{flat[: SHOWN - 1]}…"
