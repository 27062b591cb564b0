"""The demo from its first line to its last: three parts, told as they happen, and a page."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tinsmith.client.service import ServiceClient
from tinsmith.demo import crash, reinforcement, supervised
from tinsmith.demo.crash import Compared, compare_runs
from tinsmith.demo.curves import Curve, Rows, bars, page
from tinsmith.demo.picture import can_draw, draw
from tinsmith.demo.reinforcement import GROUP, Rewarded, learn_short_answers
from tinsmith.demo.service import Service
from tinsmith.demo.supervised import Learned, learn_json
from tinsmith.demo.tasks import REWARD, Example
from tinsmith.observe.terminal import is_seen, terminal

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
        """Steps of supervised learning."""
        return 5 if self.is_quick else 10

    @property
    def reward_steps(self) -> int:
        """Steps of reinforcement learning."""
        return 4 if self.is_quick else 10

    @property
    def questions(self) -> int:
        """How many are asked in each of them."""
        return 3 if self.is_quick else 4

    @property
    def tests(self) -> int:
        """How many held-out sentences are asked before and after."""
        return 3 if self.is_quick else 6

    @property
    def test_questions(self) -> int:
        """How many held-out questions are asked before and after."""
        return 3 if self.is_quick else 8


def run_demo(settings: DemoSettings) -> Path:
    """Run all of it; where the page is.

    Raises:
        TinkerError: The service could not be started, or something failed in it.
    """
    started = time.monotonic()
    service = Service(settings.out / DATA, f"{settings.model}={settings.folder}")
    _say(f"Starting `tinsmith serve` with {settings.model} (log: {service.log})")
    with _client_log() as log, service:
        _say(f"  ready after {time.monotonic() - started:.1f} s")
        # Each part has a session of its own, and the service lets its models go with that.
        with _connected(service) as client:
            learned = _supervised(client, settings)
        with _connected(service) as client:
            rewarded = _rewarded(client, settings)
        crashed = _crashed(service, settings, log)
    took_s = time.monotonic() - started
    settings.out.mkdir(parents=True, exist_ok=True)
    written = settings.out / PAGE
    written.write_text(_page(settings, learned, rewarded, crashed, took_s), encoding="utf-8")
    _say(f"\nDone in {took_s:.0f} s. Curves and answers: {written}")
    _draw(settings, learned, rewarded)
    return written


def _connected(service: Service) -> ServiceClient:
    return ServiceClient(base_url=service.url, api_key="tml-demo")


class _ClientLog(logging.StreamHandler):  # type: ignore[type-arg]
    """What the client warns of; muted while the demo itself breaks things."""

    is_muted = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is shown."""
        return not self.is_muted and bool(super().filter(record))


@contextlib.contextmanager
def _client_log() -> Iterator[_ClientLog]:
    handler = _ClientLog(sys.stdout)
    handler.setFormatter(logging.Formatter("   client log: %(message)s"))
    log = logging.getLogger("tinsmith")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


def _supervised(client: ServiceClient, settings: DemoSettings) -> Learned:
    size = f"{settings.json_steps} steps of {supervised.BATCH} examples"
    _say(f"\n1. Supervised learning: sentences to JSON ({size})")
    learned = learn_json(
        client,
        settings.model,
        steps=settings.json_steps,
        tests=settings.tests,
        seed=settings.seed,
        told=lambda losses: _progress("loss per token", losses, settings.json_steps),
    )
    _say("")
    for example, before, after in zip(learned.test, learned.before, learned.after, strict=True):
        _say_answers(example, before, after)
    _say(f"   {_supervised_summary(learned)}")
    return learned


def _supervised_summary(learned: Learned) -> str:
    right = f"{learned.right(learned.before)} before, {learned.right(learned.after)} after"
    return f"correct answers on {len(learned.test)} held-out sentences: {right}"


def _rewarded(client: ServiceClient, settings: DemoSettings) -> Rewarded:
    size = f"{settings.reward_steps} steps of {settings.questions} questions, {GROUP} answers each"
    _say(f"\n2. Reinforcement learning: short answers ({size})")
    _say(f"   reward: {REWARD}")
    rewarded = learn_short_answers(
        client,
        settings.model,
        steps=settings.reward_steps,
        questions=settings.questions,
        tests=settings.test_questions,
        seed=settings.seed,
        told=lambda rewards: _progress("mean reward", rewards, settings.reward_steps),
    )
    _say("")
    tested = zip(
        rewarded.test,
        _with_reward(rewarded.before),
        _with_reward(rewarded.after),
        strict=True,
    )
    for question, before, after in tested:
        _say_answers(question, before, after)
    _say(f"   {_rewarded_summary(rewarded)}")
    return rewarded


def _rewarded_summary(rewarded: Rewarded) -> str:
    means = f"{rewarded.before.mean:.2f} before, {rewarded.after.mean:.2f} after"
    return f"mean reward on {len(rewarded.test)} held-out questions: {means}"


def _with_reward(tested: reinforcement.Tested) -> list[str]:
    """Each question's first answer, with the mean reward of all of them."""
    return [
        f"{worth:.2f}  {answer}"
        for worth, answer in zip(tested.rewards, tested.answers, strict=True)
    ]


class _Crashed(msgspec.Struct, frozen=True):
    """What came of the kill."""

    runs: Compared
    restarted_s: float

    @property
    def summary(self) -> str:
        """What the two runs prove."""
        undisturbed, killed = self.runs.undisturbed, self.runs.killed
        if undisturbed == killed:
            return "The service was killed and restarted; results are bit-identical."
        gap = max(abs(a - b) for a, b in zip(undisturbed, killed, strict=True))
        return f"The service was killed and restarted; losses differ by up to {gap:g}."


def _crashed(service: Service, settings: DemoSettings, log: _ClientLog) -> _Crashed:
    _say("\n3. Crash safety: the same training run twice; in the second the service is killed")
    restarted_s = 0.0

    def kill() -> None:
        nonlocal restarted_s
        log.is_muted = True  # that the service does not answer is what the demo shows
        service.kill()
        _say(f"   kill -9 with {crash.STEPS - 1} steps in flight; restarting")
        restarted_s = service.start()
        _say(f"   ready after {restarted_s:.1f} s")

    try:
        runs = compare_runs(
            lambda: _connected(service), settings.model, seed=settings.seed, kill=kill
        )
    finally:
        log.is_muted = False
    for name, losses in (("undisturbed", runs.undisturbed), ("killed", runs.killed)):
        _say(f"   {name:<11} loss {'  '.join(f'{loss:.6f}' for loss in losses)}")
    crashed = _Crashed(runs, restarted_s)
    _say(f"   {crashed.summary}")
    return crashed


def _page(
    settings: DemoSettings,
    learned: Learned,
    rewarded: Rewarded,
    crashed: _Crashed,
    took_s: float,
) -> str:
    loss, reward = _curves(learned, rewarded)
    sentences = [
        (example.question, before, after)
        for example, before, after in zip(learned.test, learned.before, learned.after, strict=True)
    ]
    questions = [
        (question.question, first, f"{worth:.2f}", last, f"{later:.2f}")
        for question, first, worth, last, later in zip(
            rewarded.test,
            rewarded.before.answers,
            rewarded.before.rewards,
            rewarded.after.answers,
            rewarded.after.rewards,
            strict=True,
        )
    ]
    answers = ("question", "answer before", "reward before", "answer after", "reward after")
    return page(
        f"tinsmith demo: {settings.model}",
        [
            f"Supervised learning: {_supervised_summary(learned)}.",
            f"Reinforcement learning: {_rewarded_summary(rewarded)}.",
            crashed.summary,
            f"All of it took {took_s:.0f} s on this machine.",
        ],
        [
            loss,
            Rows("Sentences to JSON: held-out sentences", ("asked", "before", "after"), sentences),
            reward,
            Rows(
                "Short answers: held-out questions",
                answers,
                questions,
                f"Reward: {REWARD}. It is the mean of {GROUP} answers; the first one is shown.",
            ),
            _crash_rows(crashed),
            _hyperparameters(settings),
        ],
    )


def _crash_rows(crashed: _Crashed) -> Rows:
    runs = crashed.runs
    names = [f"step {number}" for number in range(1, crash.STEPS + 1)]
    rows = [
        (name, repr(first), repr(second), "yes" if first == second else "no")
        for name, first, second in zip(
            [*names, "after the last step"], runs.undisturbed, runs.killed, strict=True
        )
    ]
    return Rows(
        "Kill and restart",
        ("loss", "undisturbed run", "service killed", "bit-identical"),
        rows,
        f"kill -9 came after step 1, with {crash.STEPS - 1} steps in flight; the service was ready "
        f"again after {crashed.restarted_s:.1f} s.",
    )


def _hyperparameters(settings: DemoSettings) -> Rows:
    rows = [
        ("base model", settings.model, settings.model, settings.model),
        ("seed", *(str(settings.seed) for _ in range(3))),
        ("steps", str(settings.json_steps), str(settings.reward_steps), str(crash.STEPS)),
        (
            "batch",
            f"{supervised.BATCH} examples",
            f"{settings.questions} questions, {GROUP} answers each",
            f"{crash.BATCH} examples",
        ),
        ("loss", "cross_entropy", "importance_sampling", "cross_entropy"),
        ("LoRA rank", *(str(one.RANK) for one in (supervised, reinforcement, crash))),
        (
            "learning rate (Adam)",
            *(f"{one.LEARNING_RATE:g}" for one in (supervised, reinforcement, crash)),
        ),
        ("sampling", "temperature 0", "temperature 1", "none"),
    ]
    return Rows(
        "Hyperparameters",
        ("", "supervised learning", "reinforcement learning", "kill and restart"),
        rows,
    )


def _draw(settings: DemoSettings, learned: Learned, rewarded: Rewarded) -> None:
    if not can_draw():
        _say("For the curves as a picture: pip install matplotlib, and run it again.")
        return
    picture = settings.out / PICTURE
    draw(f"tinsmith demo: {settings.model}", _curves(learned, rewarded), picture)
    _say(f"Curves as a picture: {picture}")


def _curves(learned: Learned, rewarded: Rewarded) -> tuple[Curve, Curve]:
    return (
        Curve("Supervised learning", "loss per token", learned.losses),
        Curve("Reinforcement learning", "mean reward", rewarded.rewards),
    )


def _progress(name: str, values: list[float], steps: int) -> None:
    """Show the step: on a terminal in the place of the last one, in a file below it."""
    line = f"   step {len(values):>2}/{steps}  {name} {values[-1]:.3f}  {bars(values)}"
    if not (sys.stdout.isatty() and is_seen()):
        _say(line)
        return
    terminal.show(_progress, line)
    if len(values) == steps:
        terminal.hide(_progress)
        _say(line)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it is what the demo is for


def _say_answers(example: Example, before: str, after: str) -> None:
    _say(f"   {example.question}")
    _say(f"     before: {_short(before)}")
    _say(f"     after:  {_short(after)}")


def _short(answer: str) -> str:
    flat = " ".join(answer.split())
    return flat if len(flat) <= SHOWN else f"{flat[: SHOWN - 1]}…"
