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
For readers who want every figure; [how fast is it?](performance.md) has the short answers. This
page is written by `scripts/bench engine`.

The embedded engine is driven through its interface, as a service does it, and compared with other
ways to train and sample on a CPU. Each contestant has its own process; they take turns. **All use
one thread and float32**, except in the tables for bfloat16 and for two threads.

- *Tokens per CPU second*, the figure to compare, counts the tokens of a training pass, or the new
  tokens of samples, over the CPU time of all threads and processes.
- *Ours is* says how many times as many tokens tinsmith processes.
- *Of matmul* is the share of the rate at which torch multiplies matrices of 1024 × 576 by
  1536 × 576 in that process just before. It assumes 4 operations per frozen weight and 6 per
  adapter weight and token in training, and 2 per weight in sampling. It exceeds 100 % where
  something is computed once for many tokens.
- *Resident* is the largest memory of the process so far, with model and libraries.

SmolLM2 is the real model where it is available; the others have random weights. All weights are
stored in bfloat16, as most published models are.
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
    "Rank 32 on all linear layers, AdamW, one pass and one step, after two warm-up runs. *Even* is "
    "8 × 128 tokens. *Ragged* is 30 × 16 and 2 × 512 tokens, which the loop sorts into buckets of "
    "at most 1,024 slots, or pads to the longest. *A group* is 16 samples of 32 tokens with one "
    "prompt of 512, which the loop computes for each sample, with the head on the 33 positions "
    "that count (ours computes it on all, since the API returns all log-probabilities). Of the "
    "padded batch and of the group, the loop computes two sequences, each of which costs the same. "
    "*Eight adapters*: one sequence of 16 tokens and a step for each; the loop runs one after "
    "another, as does ours in a second run. Adapters that run together read the base's weights "
    "once; the more tokens a pass has, the less that saves. In float32 the base's products alone "
    "take about 2.0 times as long for 8 × 16 rows as for 1 × 128 with SmolLM2, and 2.2 times with "
    "the 30M model. The aims for even batches and adapters were set for bfloat16; see below. In "
    "float32, the loop reaches two thirds of the machine's matmul rate with even batches of the "
    "two larger models."
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
    "Prompts of 128 tokens, 64 new tokens per sample, temperature 1, no stops, no repeated "
    "prompts. `generate` runs one static batch; `generate_batch` is the continuous batching of "
    "`transformers`; llama.cpp has 4-bit weights. *First token* is the time until the last sample "
    "has one. *16 of one prompt* draws 16 samples from one prompt of 128. *With an adapter*: rank "
    "32 on all linear layers, not merged. *A long prompt* has 1,536 tokens and is followed by "
    "eight short ones of 32, for which the first token is measured. The aims for 32 samples were "
    "set for bfloat16; see below. A rival's share of the matmul rate bounds what can be gained on "
    "it: twice the tokens, if it is at half."
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
    "As above, with the base in bfloat16, for which the aims were set. *The products alone* "
    "multiplies with the base's weights and does nothing else: an upper bound for the rate. Eight "
    "adapters are compared with the loop, and with ours one after another. The second ratio is "
    "bounded by the cost of reading weights: with our kernels, the base's products for SmolLM2 "
    "take only 1.05 times as long for 8 × 16 rows as for 1 × 128 in the forward pass, and 1.4 "
    "times in the backward pass, while adapters and steps cost the same either way."
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
        note="As above; compare *tokens/s*, which shows what a second thread gains, and what it "
        "costs in CPU time. Samples have few rows and are limited by memory bandwidth, "
        "most of which one thread uses already.",
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
        note="The largest difference over all gradients of an adapter, relative to the largest "
        "gradient; the 1M model. The loop computes each sequence alone. The difference is "
        "the order of sums.",
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
