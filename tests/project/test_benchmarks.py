"""The benchmark harness, from the plan to the published page, with trivial contestants."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.engine_suite import ENGINE_PAGE
from benchmarks.harness import __main__ as command
from benchmarks.harness import contest, machine, report, results, rounds
from benchmarks.harness.contest import ROOT, Found
from benchmarks.harness.plan import (
    Aim,
    Benchmark,
    Call,
    Command,
    Contestant,
    Figures,
    Job,
    Page,
    Turns,
)
from benchmarks.harness.results import Measured
from benchmarks.harness.rounds import QUICK
from benchmarks.harness.summary import compare, losses, verdicts
from benchmarks.harness.timing import calibrate
from benchmarks.harness.work import Work, held_bytes
from benchmarks.suite import BENCHMARKS, PYTHONS
from benchmarks.workloads.engine import models

HERE = "tests.project.test_benchmarks"
PYTHON = {"here": Path(sys.executable)}


def small_body(size: int) -> Work:
    """A workload: make a body."""
    return Work(lambda: bytes(100 * size), [1.5] * size, len)


def large_body(size: int) -> Work:
    """A workload: make twice as much."""
    return Work(lambda: bytes(200 * size), [1.5] * size, len)


def packages(count: str) -> dict[str, float]:
    """Figures that are known without measuring."""
    return {"packages": int(count)}


def packages_and_abort(count: str) -> dict[str, float]:
    """The same, in a process that crashes at exit."""
    atexit.register(os.abort)
    return packages(count)


def token_turns(cpu_s: str) -> Callable[[], dict[str, float]]:
    """Work that takes fewer seconds in each run."""
    turns = itertools.count(1)

    def run() -> dict[str, float]:
        taken_s, number = float(cpu_s), next(turns)
        rates = {"tokens_per_cpu_s": number / taken_s, "tokens_per_s": number / taken_s}
        return {"cpu_s": taken_s / number, "matmul_share": 0.5 / number, **rates}

    return run


def contestants(*jobs: Job) -> tuple[Contestant, ...]:
    names = ("ours", "rival")
    return tuple(Contestant(name, "here", job) for name, job in zip(names, jobs, strict=True))


def a_call(name: str) -> Call:
    return Call(f"{HERE}:{name}", {"size": 1000})


CALLS = Benchmark(
    name="calls",
    group="Calls",
    title="a body",
    contestants=contestants(a_call("small_body"), a_call("large_body")),
    aims=(
        Aim("traced_peak_bytes", 0.6),
        Aim("traced_peak_bytes", 1.3, "body"),
        Aim("traced_peak_bytes", 0.01, "input and body"),
    ),
)
OTHERS = [
    Benchmark(
        name="starts",
        group="Start",
        title="a start",
        contestants=contestants(*[Command(Path(sys.executable).name, ("-c", "pass"))] * 2),
        shown=("cpu_s", "wall_s"),
        note="A note.",
    ),
    Benchmark(
        name="packages",
        group="Start",
        title="packages",
        contestants=contestants(*(Figures(f"{HERE}:packages", {"count": n}) for n in "31")),
        shown=("packages",),
    ),
]


def a_measured(ours: list[float], theirs: list[float], *aims: Aim) -> Measured:
    samples = {"ours": ours, "rival": theirs}
    return Measured(
        name="x",
        group="Group",
        title="x",
        note="",
        shown=("cpu_s",),
        aims=aims,
        samples={who: [{"cpu_s": cpu} for cpu in found] for who, found in samples.items()},
    )


def a_run(*benchmarks: Measured) -> results.Run:
    here = results.Machine("today", "cpu", 2, 4.0, "system", "commit", {}, 0.5)
    return results.Run(here, 1.0, list(benchmarks))


def test_a_quick_run_produces_a_page_with_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    found = rounds.run_rounds([CALLS, *OTHERS], PYTHON, QUICK, said.append)
    here = machine.describe(PYTHON, ROOT)
    page_of_it = Page("latest", "page.md", "Benchmarks", (CALLS, *OTHERS))
    command.write(results.Run(here, 2.0, found), tmp_path, page_of_it, tmp_path)

    assert said == [line for line in said if "round" in line] and len(said) == QUICK.rounds
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.replace("page.png", "latest.png") in capsys.readouterr().out
    assert here.cpu in page and here.commit in page
    assert "2 of 3 reached" in page and "**NOT reached**" in page and "A note." in page
    assert "| packages | ours | packages | 3 | 1 (rival) | **3** (3…3) |" in page
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert results.load((tmp_path / "latest.json").read_bytes()).benchmarks == found


def test_a_call_is_measured_in_time_and_memory() -> None:
    (found,) = rounds.run_rounds([CALLS], PYTHON, QUICK, lambda _: None)

    (ours, *_), (theirs, *_) = found.samples["ours"], found.samples["rival"]
    assert ours["payload_bytes"] == 100_000
    assert 100_000 <= ours["traced_peak_bytes"] < 101_000
    assert 200_000 <= theirs["traced_peak_bytes"] < 201_000
    assert min(ours["cpu_s"], ours["wall_s"]) > 0


RATES = Benchmark(
    name="rates",
    group="Rates",
    title="tokens",
    contestants=contestants(
        *(Turns(f"{HERE}:token_turns", {"cpu_s": seconds}) for seconds in ("1", "4"))
    ),
    shown=("cpu_s", "tokens_per_cpu_s", "matmul_share"),
)


def test_long_work_is_reported_by_its_best_run() -> None:
    (found,) = rounds.run_rounds([RATES], PYTHON, replace(QUICK, batches=2), lambda _: None)

    # A larger share came with an earlier turn, and is not mixed with the figures of this one.
    assert found.samples["ours"][0]["cpu_s"] == 0.5
    assert found.samples["ours"][0]["matmul_share"] == 0.25


def test_rates_have_a_row_per_contestant_and_are_compared_as_rates() -> None:
    found = rounds.run_rounds([RATES], PYTHON, QUICK, lambda _: None)

    page = report.markdown(a_run(*found), "x.png", "A title", "An introduction.")

    assert page.startswith("# A title\n\nAn introduction.\n")
    assert "| tokens | ours | 1.0 |  | 1.0 | 50 % | – | – |" in page
    assert "|  | rival | 0.2 | 4× | 0.2 | 50 % | – | – |" in page
    assert losses(a_run(*found)) == []


def test_an_aim_against_an_optional_rival_is_judged_only_if_it_ran() -> None:
    found = a_measured([1.0], [2.0], Aim("cpu_s", 0.5, beside="third"))
    samples = {"ours": [{"cpu_s": 1.0}], "third": [{"cpu_s": 1.5}], "rival": [{"cpu_s": 2.0}]}
    with_third = msgspec.structs.replace(found, samples=samples, yardsticks=("third",))

    assert verdicts(a_run(found)) == []
    (verdict,) = verdicts(a_run(with_third))
    assert not verdict.is_reached and verdict.found.middle == pytest.approx(2 / 3)


def test_contestants_alternate_and_swap_order_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def record(worker: contest.Worker) -> Found:
        order.append("ours" if worker._target.endswith("small_body") else "rival")
        return {"cpu_s": 1.0}

    monkeypatch.setattr(contest.Worker, "batch", record)

    rounds.run_rounds([CALLS], PYTHON, replace(QUICK, batches=3), lambda _: None)

    assert order == ["ours", "rival"] * 3 + ["rival", "ours"] * 3


def test_no_round_starts_that_would_exceed_the_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "run_round", lambda *_, **__: {"ours": {}, "rival": {}})
    said: list[str] = []

    found = rounds.run_rounds([CALLS], PYTHON, rounds.Settings(budget_s=0), said.append)

    assert len(found[0].samples["ours"]) == 1
    assert "stopping here" in said[-1]


def test_a_failing_contestant_is_reported_with_its_output() -> None:
    broken = Call(f"{HERE}:small_body", {"length": 1})
    benchmark = Benchmark("x", "Group", "x", contestants(broken, broken))

    with pytest.raises(RuntimeError, match=r"(?s)small_body failed.*unexpected keyword"):
        rounds.run_rounds([benchmark], PYTHON, QUICK, lambda _: None)


def test_a_crash_at_exit_does_not_discard_measurements() -> None:
    crashing = Figures(f"{HERE}:packages_and_abort", {"count": "3"})
    benchmark = replace(OTHERS[-1], contestants=contestants(crashing, crashing))

    (found,) = rounds.run_rounds([benchmark], PYTHON, QUICK, lambda _: None)

    assert found.samples["ours"][0] == {"packages": 3.0}


def test_ratios_are_computed_per_round() -> None:
    """A busy machine slows both contestants down, so their ratio stays the same."""
    found = a_measured([1.0, 10.0, 2.0], [2.0, 20.0, 2.0])

    ratio = compare(found, "ours", "rival", "cpu_s").ratio

    assert ratio == (0.5, 0.5, 1.0)


def test_a_target_is_judged_by_the_median_and_losses_are_listed_worst_first() -> None:
    aim = Aim("cpu_s", 0.5)
    won = a_measured([1.0, 1.0, 9.0], [2.0, 2.0, 2.0], aim)
    lost = a_measured([3.0], [2.0], aim)
    lost_more = a_measured([9.0], [2.0], aim)
    run = a_run(won, lost, lost_more)

    assert [verdict.is_reached for verdict in verdicts(run)] == [True, False, False]
    assert [loss.benchmark for loss in losses(run)] == [lost_more, lost]


def test_a_yardstick_has_no_targets_and_no_losses() -> None:
    found = a_measured([3.0], [2.0], Aim("cpu_s", 0.5))
    run = a_run(msgspec.structs.replace(found, yardsticks=("ours",)))

    assert verdicts(run) == []
    assert losses(run) == []


def test_repetitions_are_calibrated_to_be_measurable() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        sum(range(1000))

    repetitions = calibrate(run, 0.01)

    assert 1 < repetitions < 100 * calls


def test_the_size_of_an_input_includes_its_elements() -> None:
    numbers = [1.5, 2.5]

    assert held_bytes(memoryview(bytes(1000))) == 1000
    assert held_bytes(numbers) == sys.getsizeof(numbers) + 2 * sys.getsizeof(1.5)
    assert held_bytes([numbers]) == sys.getsizeof([numbers]) + held_bytes(numbers)


def test_every_benchmark_has_a_unique_name_and_a_known_environment() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]

    assert len(names) == len(set(names))
    assert {one.environment for b in BENCHMARKS for one in b.contestants} <= set(PYTHONS)


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0

    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [benchmark.name for benchmark in BENCHMARKS]


def test_engine_benchmarks_run_only_on_request() -> None:
    assert not [one for one in command._chosen([]) if one.name.startswith("engine-")]
    assert tuple(command._chosen(["engine"])) == ENGINE_PAGE.benchmarks
    assert [one.name for one in command._chosen(["engine-train-even"])] == [
        f"engine-train-even-{model}" for model in ("135m", "30m", "1m")
    ]


def test_a_large_rival_runs_only_on_request() -> None:
    one, *_ = command._chosen(["engine-sample-32-135m"])

    assert "vLLM" not in [rival.name for rival in command._with(one, ()).contestants]
    assert command._with(one, ("vllm",)) == one


def test_an_unknown_name_is_rejected() -> None:
    with pytest.raises(SystemExit, match="no benchmark is named nonsense"):
        command.main(["nonsense"])


def test_stored_results_are_readable_and_published() -> None:
    kept = ROOT / "benchmarks/results"
    run = results.load((kept / "latest.json").read_bytes())

    assert json.loads((kept / "latest.json").read_text()) and run.benchmarks
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").count(run.machine.date) == 1


def test_a_cached_random_model_of_another_dtype_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page states the dtype of all models, so a cached folder is checked."""
    monkeypatch.setattr(models, "FOLDER", tmp_path / "models")
    folder = models.folder_of("1m")
    weights = folder / "model.safetensors"
    made = weights.read_bytes()
    assert b'"F32"' not in made[:10_000]

    weights.write_bytes(b"kept")
    models.folder_of("1m")
    assert weights.read_bytes() == b"kept"

    former = {**models.SHAPES["1m"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(former))
    models.folder_of("1m")
    assert weights.read_bytes() == made


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("flags\t\t: fpu avx512f", "no hardware for bfloat16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", "avx512_bf16, amx_bf16"),
        ("Features\t: fp asimd bf16", "bf16"),
    ],
)
def test_a_page_says_whether_the_machine_has_bfloat16_hardware(flags: str, said: str) -> None:
    """The notes on bfloat16 refer to it."""
    cpuinfo = f"processor\t: 0\nmodel name\t: A CPU: fast\n{flags}\n\n"

    assert machine.cpu_in_words(cpuinfo * 2) == f"A CPU: fast, {said}"
