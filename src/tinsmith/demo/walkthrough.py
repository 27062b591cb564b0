"""The demo: starts a service, runs three parts with progress on stdout, and writes a report."""

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
from tinsmith.demo.crash import CrashComparison, compare_runs
from tinsmith.demo.curves import Curve, ReportTable, bars, can_draw, draw, page
from tinsmith.demo.reinforcement import (
    GROUP,
    HeldOutAnswers,
    ReinforcementResult,
    learn_short_answers,
)
from tinsmith.demo.service_process import ServiceProcess
from tinsmith.demo.supervised import SupervisedResult, learn_json
from tinsmith.demo.tasks import REWARD, TaskExample
from tinsmith.observe.terminal import is_seen, terminal

PAGE = "demo.html"
PICTURE = "demo.png"
DATA = "demo-data"
"""The service's data folder, which the next demo deletes."""
ANSWER_COLUMNS = 64
"""An answer is cut to this many characters on a terminal of 80 columns."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo runs, and where it writes."""

    model: str
    folder: Path
    """The folder with the model's files."""
    out: Path
    """Gets the report, the picture and the service's data."""
    seed: int = 0
    json_steps: int = 10
    """Number of steps of supervised learning."""
    reward_steps: int = 10
    """Number of steps of reinforcement learning."""
    questions: int = 4
    """Number of questions per step of reinforcement learning."""
    tests: int = 6
    """Number of held-out sentences."""
    test_questions: int = 8
    """Number of held-out questions."""


QUICK = {"json_steps": 5, "reward_steps": 4, "questions": 3, "tests": 3, "test_questions": 3}
"""The fields of a shorter demo."""


def run_demo(settings: DemoSettings) -> Path:
    """Run the demo and return the path of its report.

    Raises:
        TinkerError: The service did not start, or a call failed.
    """
    started = time.monotonic()
    service = ServiceProcess(settings.out / DATA, f"{settings.model}={settings.folder}")
    _say(f"Starting `tinsmith serve` with {settings.model} (log: {service.log})")
    with _client_log() as log, service:
        _say(f"  ready after {time.monotonic() - started:.1f} s")
        # A session per part: the service unloads its models when the session ends.
        with _connect(service) as client:
            learned = _supervised(client, settings)
        with _connect(service) as client:
            rewarded = _rewarded(client, settings)
        crashed = _crashed(service, settings, log)
    took_s = time.monotonic() - started
    settings.out.mkdir(parents=True, exist_ok=True)
    report = settings.out / PAGE
    report.write_text(_page(settings, learned, rewarded, crashed, took_s), encoding="utf-8")
    _say(f"\nDone in {took_s:.0f} s. Report: {report}")
    _draw(settings, learned, rewarded)
    return report


def _connect(service: ServiceProcess) -> ServiceClient:
    return ServiceClient(base_url=service.url, api_key="tml-demo")


class _ClientLog(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints the client's warnings, except while the demo kills the service."""

    is_muted = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to print the record."""
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


def _supervised(client: ServiceClient, settings: DemoSettings) -> SupervisedResult:
    size = f"{settings.json_steps} steps of {supervised.BATCH} examples"
    _say(f"\n1. Supervised learning: sentences to JSON ({size})")
    learned = learn_json(
        client,
        settings.model,
        steps=settings.json_steps,
        tests=settings.tests,
        seed=settings.seed,
        on_step=lambda losses: _progress("loss per token", losses, settings.json_steps),
    )
    _say("")
    for example, before, after in zip(learned.test, learned.before, learned.after, strict=True):
        _say_answers(example, before, after)
    _say(f"   {_supervised_summary(learned)}")
    return learned


def _supervised_summary(learned: SupervisedResult) -> str:
    right = f"{learned.correct(learned.before)} before, {learned.correct(learned.after)} after"
    return f"correct answers on {len(learned.test)} held-out sentences: {right}"


def _rewarded(client: ServiceClient, settings: DemoSettings) -> ReinforcementResult:
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
        on_step=lambda rewards: _progress("mean reward", rewards, settings.reward_steps),
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


def _rewarded_summary(rewarded: ReinforcementResult) -> str:
    means = f"{rewarded.before.mean:.2f} before, {rewarded.after.mean:.2f} after"
    return f"mean reward on {len(rewarded.test)} held-out questions: {means}"


def _with_reward(tested: HeldOutAnswers) -> list[str]:
    """The first answer to each question, after the mean reward of all its answers."""
    return [
        f"{reward:.2f}  {answer}"
        for reward, answer in zip(tested.rewards, tested.answers, strict=True)
    ]


class _Crashed(msgspec.Struct, frozen=True):
    """The result of killing the service."""

    runs: CrashComparison
    restarted_s: float

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        undisturbed, killed = self.runs.undisturbed, self.runs.killed
        if undisturbed == killed:
            return "The service was killed and restarted; results are bit-identical."
        gap = max(abs(a - b) for a, b in zip(undisturbed, killed, strict=True))
        return f"The service was killed and restarted; losses differ by up to {gap:g}."


def _crashed(service: ServiceProcess, settings: DemoSettings, log: _ClientLog) -> _Crashed:
    _say("\n3. Crash safety: the same training run twice; in the second the service is killed")
    restarted_s = 0.0

    def kill() -> None:
        nonlocal restarted_s
        log.is_muted = True  # the warnings are expected
        service.kill()
        _say(f"   kill -9 with {crash.STEPS - 1} steps in flight; restarting")
        restarted_s = service.start()
        _say(f"   ready after {restarted_s:.1f} s")

    try:
        runs = compare_runs(
            lambda: _connect(service), settings.model, seed=settings.seed, kill=kill
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
    learned: SupervisedResult,
    rewarded: ReinforcementResult,
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
            f"The demo took {took_s:.0f} s on this machine.",
        ],
        [
            loss,
            ReportTable(
                "Sentences to JSON: held-out sentences",
                ("sentence", "answer before", "answer after"),
                sentences,
            ),
            reward,
            ReportTable(
                "Short answers: held-out questions",
                answers,
                questions,
                f"Reward: {REWARD}; mean of {GROUP} answers. The first answer is shown.",
            ),
            _crash_rows(crashed),
            _hyperparameters(settings),
        ],
    )


def _crash_rows(crashed: _Crashed) -> ReportTable:
    runs = crashed.runs
    names = [f"step {number}" for number in range(1, crash.STEPS + 1)]
    rows = [
        (name, repr(first), repr(second), "yes" if first == second else "no")
        for name, first, second in zip(
            [*names, "after the last step"], runs.undisturbed, runs.killed, strict=True
        )
    ]
    return ReportTable(
        "Kill and restart",
        ("loss", "undisturbed run", "service killed", "bit-identical"),
        rows,
        f"The service was killed (kill -9) after step 1, with {crash.STEPS - 1} steps in flight, "
        f"and was ready again after {crashed.restarted_s:.1f} s.",
    )


def _hyperparameters(settings: DemoSettings) -> ReportTable:
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
    return ReportTable(
        "Hyperparameters",
        ("", "supervised learning", "reinforcement learning", "kill and restart"),
        rows,
    )


def _draw(settings: DemoSettings, learned: SupervisedResult, rewarded: ReinforcementResult) -> None:
    if not can_draw():
        _say("To get the curves as a PNG file, run `pip install matplotlib` and repeat the demo.")
        return
    picture = settings.out / PICTURE
    draw(f"tinsmith demo: {settings.model}", _curves(learned, rewarded), picture)
    _say(f"Curves: {picture}")


def _curves(learned: SupervisedResult, rewarded: ReinforcementResult) -> tuple[Curve, Curve]:
    return (
        Curve("Supervised learning", "loss per token", learned.losses),
        Curve("Reinforcement learning", "mean reward", rewarded.rewards),
    )


def _progress(name: str, values: list[float], steps: int) -> None:
    """Print a step; on a terminal it replaces the previous step."""
    line = f"   step {len(values):>2}/{steps}  {name} {values[-1]:.3f}  {bars(values)}"
    if not (sys.stdout.isatty() and is_seen()):
        _say(line)
        return
    terminal.show(_progress, line)
    if len(values) == steps:
        terminal.hide(_progress)
        _say(line)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the demo's output


def _say_answers(example: TaskExample, before: str, after: str) -> None:
    _say(f"   {example.question}")
    _say(f"     before: {_short(before)}")
    _say(f"     after:  {_short(after)}")


def _short(answer: str) -> str:
    flat = " ".join(answer.split())
    return flat if len(flat) <= ANSWER_COLUMNS else f"{flat[: ANSWER_COLUMNS - 1]}…"
