"""The engine's benchmarks, and what they are meant to reach.

Figures are for each token: one that a training pass went over, or a new one of a sample. Rates are
compared per CPU-second, within one run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from benchmarks.harness.machine import multiplies_bfloat16
from benchmarks.harness.plan import Aim, Benchmark, Contestant, Figures, Metric, Page, Turns

NOBODY_BESIDE = "tinsmith, nobody else"
OURS, ANOTHER, ALONE = "tinsmith", "tinsmith, one after another", "tinsmith, one thread"
LOOP, SET_ADAPTER = "transformers + peft", "transformers + peft, `set_adapter`"
BUCKETS, PADDED = "peft, sorted buckets", "peft, padded"
GENERATE, CONTINUOUS = "generate", "generate_batch"
LLAMA_CPP, VLLM = "llama.cpp, 4 bits", "vLLM"
PRODUCTS = "the products alone"

INTRODUCTION = """\
Made by `scripts/bench engine`; do not edit. The embedded engine, driven through its interface as a
service drives it, beside what else trains and samples on a CPU. Each contestant has a process of
its own and prepares there; then they take turns. **Everybody has one thread, and computes in
float32**, except in the tables for bfloat16 and for two threads.

*Tokens per CPU-second* is what to compare: those that a training pass went over, or new tokens of
samples; all threads and processes count. *Ours is* says how many times as many ours makes. *Of
matmul* is the share of the rate at which torch multiplies matrices of 1024 × 576 by 1536 × 576 in
that process just before, if each token takes 4 operations for each frozen weight and 6 for each of
the adapter's in training, and 2 for each weight in sampling: what is computed once for many exceeds
it. *Resident* is the largest memory of the process so far, model and libraries included.

SmolLM2 is the real model where it can be had; the others have random weights. All are files of
bfloat16, as most published models are.
"""

_TITLES = {"135m": "SmolLM2-135M", "30m": "30M", "1m": "1M"}
_SHOWN: tuple[Metric, ...] = (
    "cpu_s",
    "tokens_per_cpu_s",
    "tokens_per_s",
    "matmul_share",
    "first_token_s",
    "resident_bytes",
)
_HERE = "benchmarks.workloads.engine"
Rival: TypeAlias = Callable[..., Contestant]
"""Makes a contestant of what all are told: the model, how many samples, the type."""


def _turns(name: str, target: str, **told: str) -> Contestant:
    return Contestant(name, "engine", Turns(f"{_HERE}.{target}", told))


def _beside(name: str, target: str, **told: str) -> Contestant:
    return Contestant(name, "engine", Turns(f"{_HERE}.{target}", told), is_yardstick=True)


def _vllm(**told: str) -> Contestant:
    return Contestant(VLLM, "vllm", Turns(f"{_HERE}.vllm_cpu:sampling", told), is_yardstick=True)


def _batched(**told: str) -> Contestant:
    return _beside(CONTINUOUS, "generate:continuous", **told)


def _llama_cpp(**told: str) -> Contestant:
    return _beside(LLAMA_CPP, "llama_cpp:sampling", count=told["count"])


def _products(**told: str) -> Contestant:
    return _beside(PRODUCTS, "products:sampling", **told)


def _times(least: float, *, beside: str | None = None, of: str = OURS) -> Aim:
    """So many times as many tokens per CPU-second."""
    return Aim("cpu_s", 1 / least, of=of, beside=beside)


# Who takes part; in float32 unless they are told another `dtype`


def _trains(mode: str = "buckets", **told: str) -> tuple[Contestant, ...]:
    return (
        _turns(OURS, "ours:training", **told),
        _turns(LOOP, "peft_loop:training", mode=mode, **told),
    )


def _trains_ragged(**told: str) -> tuple[Contestant, ...]:
    return (
        _turns(OURS, "ours:training", batch="ragged", **told),
        _beside(BUCKETS, "peft_loop:training", batch="ragged", **told),
        _turns(PADDED, "peft_loop:training", batch="ragged", mode="padded", **told),
    )


def _trains_adapters(**told: str) -> tuple[Contestant, ...]:
    return (
        _turns(OURS, "ours:adapters", order="together", **told),
        _beside(ANOTHER, "ours:adapters", order="another", **told),
        _turns(SET_ADAPTER, "peft_loop:adapters", **told),
    )


def _samples(*others: Rival, **told: str) -> tuple[Contestant, ...]:
    return (
        _turns(OURS, "ours:sampling", **told),
        *(other(**told) for other in others),
        _turns(GENERATE, "generate:static", **told),
    )


# Training

_RAGGED_AIMS = _times(8), _times(1, beside=BUCKETS)
_TRAINING_NOTE = (
    "Rank 32 on all linear layers, AdamW, a pass and a step, which run twice before they are "
    "measured. Even is 8 × 128 tokens; ragged is "
    "30 × 16 and 2 × 512, which the loop sorts into buckets of at most 1,024 slots, or pads to the "
    "longest; a group is 16 samples of 32 tokens behind one prompt of 512, which the loop computes "
    "in full for each, with the head on the 33 positions that count (ours has it on all, since the "
    "API returns all log-probabilities). Of the padded batch and of the group the loop computes "
    "two sequences, each of which costs the same. Adapters: eight of them, one sequence of 16 "
    "tokens and a step for each; the loop takes one after another, as does ours in a second run. "
    "What passes save together is the reading of the base's weights; the more tokens a pass has, "
    "the less of its time that is. In float32 the base's products alone, without adapters and "
    "steps, take about 2.0 times as long at 8 × 16 rows as at 1 × 128 for SmolLM2, and 2.2 times "
    "for the 30M model: what is gained beyond that comes of the calls' own costs. Aims for "
    "even batches and for adapters were set for bfloat16 and stand with its tables, below. In "
    "float32 the loop is with even batches of the two larger models at two thirds of the machine's "
    "rate by itself."
)


def _training(
    model: str, what: str, title: str, contestants: tuple[Contestant, ...], *aims: Aim
) -> Benchmark:
    return Benchmark(
        name=f"engine-train-{what}-{model}",
        group="Training",
        title=f"{_TITLES[model]}: {title}",
        contestants=contestants,
        aims=aims,
        shown=_SHOWN,
        note=_TRAINING_NOTE,
    )


def _even(model: str) -> Benchmark:
    return _training(model, "even", "even", _trains(model=model, batch="even"))


def _ragged(model: str) -> Benchmark:
    return _training(model, "ragged", "ragged", _trains_ragged(model=model), *_RAGGED_AIMS)


def _group(model: str) -> Benchmark:
    contestants = _trains("full", model=model, batch="group")
    return _training(model, "group", "a group that shares its prompt", contestants, _times(5))


def _adapters(model: str) -> Benchmark:
    return _training(model, "adapters", "eight adapters", _trains_adapters(model=model))


TRAINING = (
    _even("135m"),
    _ragged("135m"),
    _group("135m"),
    _adapters("135m"),
    _even("30m"),
    _ragged("30m"),
    _group("30m"),
    _adapters("30m"),
    _even("1m"),
    _adapters("1m"),
)

# Sampling

_SAMPLING_NOTE = (
    "Prompts of 128 tokens, 64 new ones for each sample, temperature 1, no stops, no prompt that "
    "was seen before. `generate` runs one static batch; `generate_batch` is the continuous "
    "batching of `transformers`; llama.cpp has the weights in 4 bits. The first token is that of "
    "the last sample. *16 of one prompt* draws 16 samples of one prompt of 128. An adapter is "
    "one of rank 32 on all linear layers, which is not merged into the base. *A long prompt* has "
    "1,536 tokens, and eight short ones of 32 come right behind it: the first token is that of "
    "the short ones. The aims for 32 samples were set for bfloat16 and stand with its tables, "
    "below; the share of the matmul rate that a rival has tells the most that can be gained on it: "
    "of one that is at half of it, twice the tokens. *Beside 900 of another tenant* is one sample "
    "of 16 tokens, from when it comes to its end, with whatever is computed for the other tenant "
    "meanwhile; it is held against the same sample with nobody beside it."
)


def _sampling(
    model: str, what: str, title: str, contestants: tuple[Contestant, ...], *aims: Aim
) -> Benchmark:
    return Benchmark(
        name=f"engine-sample-{what}-{model}",
        group="Sampling",
        title=f"{_TITLES[model]}: {title}",
        contestants=contestants,
        aims=aims,
        shown=_SHOWN,
        note=_SAMPLING_NOTE,
    )


def _at_once(model: str, count: int, *others: Rival, aims: tuple[Aim, ...] = ()) -> Benchmark:
    title = "one sample" if count == 1 else f"{count} samples at once"
    contestants = _samples(*others, model=model, count=str(count))
    return _sampling(model, str(count), title, contestants, *aims)


def _long(model: str) -> Benchmark:
    told = {"model": model, "long": "1536", "shorts": "8"}
    contestants = (
        _turns(OURS, "ours:long_among_short", **told),
        _turns(CONTINUOUS, "generate:long_among_short", **told),
    )
    return _sampling(model, "long", "a long prompt among short ones", contestants)


def _beside_many(model: str) -> Benchmark:
    contestants = (
        _turns(OURS, "ours:beside", model=model, others="900"),
        _turns(NOBODY_BESIDE, "ours:beside", model=model, others="0"),
    )
    return _sampling(model, "beside", "beside 900 of another tenant", contestants, _times(1 / 5))


SAMPLING = (
    _at_once("135m", 1, _batched, _llama_cpp, _vllm, aims=(_times(1),)),
    _at_once("135m", 8, _batched, _vllm),
    _at_once("135m", 32, _vllm),
    _sampling(
        "135m",
        "8-lora",
        "8 with an adapter",
        _samples(_vllm, model="135m", count="8", lora="yes"),
        _times(4, beside=VLLM),
    ),
    _sampling("135m", "group", "16 of one prompt", _samples(model="135m", count="1", samples="16")),
    _long("135m"),
    _at_once("30m", 32, _batched),
    _at_once("30m", 128),
    _at_once("1m", 1),
    _at_once("1m", 32),
    _at_once("1m", 128),
    _beside_many("1m"),
)

# bfloat16

_HALF = {"dtype": "bfloat16"}
_IS_SLOW = not multiplies_bfloat16()
"""Then torch's products in it take twenty times as long, and everybody gets less to do."""
_SAMPLED = {"prompt": "16", "new": "8", **_HALF} if _IS_SLOW else _HALF
_HALF_NOTE = (
    "As above, with the base in bfloat16, for which the aims were set. *The products alone* are "
    "ours with the base's weights, and nothing else of the work: whoever computes the rest for "
    "nothing is so fast. Eight adapters are held against the loop and against ours, one after "
    "another. The latter ratio is bounded by what the reading of weights costs a small pass: where "
    "our kernels multiply, the base's products take only 1.05 times as long at 8 × 16 rows as at "
    "1 × 128 on the way in and 1.4 times on the way back, for SmolLM2, while adapters and steps "
    "cost the same either way. The faster a pass of a lone adapter gets, the smaller it is."
)
_SLOW_NOTE = (
    " This machine has no hardware for bfloat16. Since the others need so long, even is 4 × 32 "
    "tokens, 8 or 32 samples have prompts of 16 tokens and 8 new ones, and before ragged batches "
    "and groups the loop warms up with 4 × 32 tokens. **Torch's products in that type are what "
    "makes the others slow**, by a factor of twenty and more, and an aim that is reached here "
    "tells of little else; ours holds the weights in bfloat16 and computes in float32. The tables "
    "for float32 show the most that the others reach on such a machine."
)


def _half(
    model: str, what: str, title: str, contestants: tuple[Contestant, ...], *aims: Aim
) -> Benchmark:
    return Benchmark(
        name=f"engine-bf16-{what}-{model}",
        group="In bfloat16",
        title=f"{_TITLES[model]}, bfloat16: {title}",
        contestants=contestants,
        aims=aims,
        shown=_SHOWN,
        note=_HALF_NOTE + _SLOW_NOTE if _IS_SLOW else _HALF_NOTE,
    )


def _half_training(model: str) -> Benchmark:
    batch, title = ("tiny", "even, 4 × 32") if _IS_SLOW else ("even", "even")
    ours, loop = _trains(model=model, batch=batch, **_HALF)
    products = _trained_products(model, "128" if _IS_SLOW else "1024")
    return _half(model, "even", title, (ours, products, loop), _times(1.3))


def _trained_products(model: str, rows: str) -> Contestant:
    return _beside(PRODUCTS, "products:training", model=model, rows=rows, **_HALF)


def _half_ragged(model: str) -> Benchmark:
    contestants = _trains_ragged(model=model, **_HALF)
    return _half(model, "ragged", "ragged", contestants, *_RAGGED_AIMS)


def _half_group(model: str) -> Benchmark:
    contestants = _trains("full", model=model, batch="group", **_HALF)
    return _half(model, "group", "a group that shares its prompt", contestants, _times(5))


def _half_adapters(model: str) -> Benchmark:
    ours, another, loop = _trains_adapters(model=model, **_HALF)
    contestants = (ours, another, _trained_products(model, "128"), loop)
    aims = _times(3), _times(3, beside=ANOTHER)
    return _half(model, "adapters", "eight adapters", contestants, *aims)


def _half_sampling(model: str, *others: Rival, aims: tuple[Aim, ...] = ()) -> Benchmark:
    contestants = _samples(*others, _products, model=model, count="32", **_SAMPLED)
    return _half(model, "32", "32 samples at once", contestants, _times(2.5), *aims)


BFLOAT16 = (
    _half_training("135m"),
    *(() if _IS_SLOW else (_half_ragged("135m"), _half_group("135m"))),
    _half_adapters("135m"),
    _half("135m", "1", "one sample", _samples(_vllm, model="135m", count="1", **_HALF), _times(1)),
    _half(
        "135m",
        "8",
        "8 samples at once",
        _samples(_vllm, model="135m", count="8", **_SAMPLED),
    ),
    _half_sampling("135m", _vllm, aims=(_times(1.3, beside=VLLM),)),
    _half(
        "135m",
        "8-lora",
        "8 with an adapter",
        _samples(_vllm, model="135m", count="8", lora="yes", **_SAMPLED),
        _times(4, beside=VLLM),
    ),
    _half_training("30m"),
    _half_ragged("30m"),
    _half_group("30m"),
    _half_adapters("30m"),
    _half_sampling("30m"),
    _half_adapters("1m"),
)

# Two threads, as a service takes where four cores are free

_TWO = {"threads": "2", **_HALF}


def _by_two(what: str, title: str, ours: str, rival: Contestant, **told: str) -> Benchmark:
    return Benchmark(
        name=f"engine-two-{what}-135m",
        group="In bfloat16, with two threads",
        title=f"SmolLM2-135M, two threads: {title}",
        contestants=(
            _turns(OURS, ours, model="135m", **told, **_TWO),
            _beside(ALONE, ours, model="135m", **told, **_HALF),
            rival,
        ),
        shown=_SHOWN,
        note="As above, and what to compare is *tokens/s*: what a second thread gives, and what it "
        "costs in CPU time. Few rows, as samples have, are limited by how fast memory is read, "
        "which one thread nearly does alone.",
    )


def _sampled_by_two(count: int) -> Benchmark:
    title = "one sample" if count == 1 else f"{count} samples at once"
    rival = _turns(GENERATE, "generate:static", model="135m", count=str(count), **_TWO)
    return _by_two(str(count), title, "ours:sampling", rival, count=str(count))


TWO_THREADS = (
    ()
    if _IS_SLOW
    else (
        _by_two(
            "even",
            "even",
            "ours:training",
            _turns(LOOP, "peft_loop:training", model="135m", batch="even", **_TWO),
            batch="even",
        ),
        *map(_sampled_by_two, (1, 8, 32)),
    )
)

# Exactness

EXACTNESS = tuple(
    Benchmark(
        name=f"engine-gradients-{batch}",
        group="Gradients, beside those of the loop in float64",
        title=title,
        contestants=tuple(
            Contestant(
                name,
                "engine",
                Figures(f"{_HERE}.gradients:difference", {"who": who, "batch": batch}),
            )
            for name, who in ((OURS, "ours"), (LOOP, "peft"))
        ),
        aims=(Aim("difference", 1e-5, "itself", of=OURS),),
        shown=("difference",),
        note="The largest difference of all gradients of an adapter, over the largest of them; the "
        "1M model. The loop computes each sequence alone. What differs is the order of sums.",
        most_rounds=1,
    )
    for batch, title in (
        ("even", "even"),
        ("ragged", "ragged"),
        ("group", "a group that shares its prompt"),
    )
)

ENGINE_PAGE = Page(
    name="engine",
    published="benchmarks-engine.md",
    title="Benchmarks of the engine",
    benchmarks=(*TRAINING, *SAMPLING, *BFLOAT16, *TWO_THREADS, *EXACTNESS),
    introduction=INTRODUCTION,
)
