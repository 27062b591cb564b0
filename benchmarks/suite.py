"""Every benchmark, and what it is meant to reach.

Aims against the rival are ratios of one run. A peak is held against the body that is made or read
in the two readings that `plan.Aim` names: all memory with the input counted on both sides, and
strictly, beyond the input and over the body alone. Where the caller asks for Python lists, which
take far more than the body, there is no such aim.

Strictly, training requests are held to it in parts, which is how the client sends them: a joined
body stands beside the arrays that it was joined from.
"""

from __future__ import annotations

from benchmarks.engine_suite import ENGINE_PAGE
from benchmarks.harness.contest import ROOT
from benchmarks.harness.plan import (
    Aim,
    Benchmark,
    Call,
    Command,
    Contestant,
    Figures,
    Job,
    Metric,
    Page,
)

PYTHONS = {
    name: ROOT / f".venv-bench-{name}" / "bin" / "python"
    for name in ("core", "ours", "official", "server", "engine", "vllm")
}
OPTIONAL = {"vllm"}
"""Environments whose contestants take part when they are asked for."""

OURS, PARTS, OFFICIAL, LIBRARY = "tinsmith", "tinsmith, in parts", "tinker", "protobuf library"
BARE = "bare Python"

LONG = {"tokens": 32_768, "count": 1}
BATCH = {"tokens": 32_768, "count": 64}
SMALL = {"tokens": 64, "count": 1024}
ANSWER = {"tokens": 4096}
TOP_20 = {"tokens": 4096, "k": 20}
OUTPUT = {"tokens": 4096, "count": 128}


def _peaks(metric: Metric, strictly: str | None = None) -> tuple[Aim, ...]:
    """Both readings; the strict one for everybody, or for one contestant."""
    return (Aim(metric, 1.3, "input and body"), Aim(metric, 1.3, "body", of=strictly))


PEAK = _peaks("traced_peak_bytes")
# In pages, and in what the allocator asks for at once: it means something for large bodies alone.
LARGE_PEAK = (*PEAK, *_peaks("resident_peak_bytes"))
SENT_PEAK = _peaks("traced_peak_bytes", PARTS)
LARGE_SENT_PEAK = (*SENT_PEAK, *_peaks("resident_peak_bytes", PARTS))


def _cpu(at_most: float) -> Aim:
    return Aim("cpu_s", at_most)


def _ours(name: str, job: Job, environment: str = "ours") -> Contestant:
    return Contestant(name, environment, job)


def _rival(job: Job) -> Contestant:
    return Contestant(OFFICIAL, "official", job)


def _calls(
    function: str, sizes: dict[str, int], *, with_parts: bool = False
) -> tuple[Contestant, ...]:
    """The function of that name in both modules of workloads."""
    contestants = [_ours(OURS, Call(f"benchmarks.workloads.ours:{function}", sizes))]
    if with_parts:
        in_parts = Call(f"benchmarks.workloads.ours:{function}_parts", sizes)
        contestants.append(_ours(PARTS, in_parts))
    official = Call(f"benchmarks.workloads.official:{function}", sizes)
    return (*contestants, _rival(official))


def _codec(ours: str, library: str, sizes: dict[str, int]) -> tuple[Contestant, ...]:
    contestants = [_ours(OURS, Call(f"benchmarks.workloads.ours:{ours}", sizes))]
    if ours == "codec_encode":
        contestants.append(_ours(PARTS, Call(f"benchmarks.workloads.ours:{ours}_parts", sizes)))
    job = Call(f"benchmarks.workloads.protobuf_library:{library}", sizes)
    return (*contestants, Contestant(LIBRARY, "official", job))


_TRAINING = "Training requests: build and encode"
_TRAINING_NOTE = (
    "*tinsmith* joins the parts into one body, as the official SDK does. *In parts* passes the "
    "memory of the arrays to the transport, as our client does; the strict aim is for it. While a "
    "list is encoded, its numbers are held in a tuple of eight bytes each. Encoding in blocks "
    "would avoid that and take a quarter more CPU time. The official `ModelInput` takes only "
    "lists, so arrays of tokens go through `.tolist()`."
)


def _training(name: str, title: str, sizes: dict[str, int], *aims: Aim) -> Benchmark:
    function = f"train_{name.rsplit('-', 1)[1]}"
    return Benchmark(
        name=name,
        group=_TRAINING,
        title=title,
        contestants=_calls(function, sizes, with_parts=True),
        aims=aims,
        note=_TRAINING_NOTE,
    )


TRAINING = [
    _training("datum-lists", "1 datum of 32,768, lists", LONG, _cpu(1 / 3), *SENT_PEAK),
    _training("datum-mixed", "1 datum, list of tokens, arrays", LONG, _cpu(1 / 3), *SENT_PEAK),
    _training("datum-arrays", "1 datum, arrays", LONG, _cpu(1 / 3), *SENT_PEAK),
    _training("batch-lists", "64 datums of 32,768, lists", BATCH, _cpu(1 / 3), *LARGE_SENT_PEAK),
    _training("batch-arrays", "64 datums, arrays", BATCH, _cpu(1 / 3), *LARGE_SENT_PEAK),
    _training("small-lists", "1,024 datums of 64, lists", SMALL),
    _training("small-arrays", "1,024 datums of 64, arrays", SMALL),
]

SAMPLING = [
    Benchmark(
        name=f"sample-{kind}",
        group="Sample requests: build and encode to JSON",
        title=f"32,768-token prompt, {kind}",
        contestants=_calls(f"sample_{kind}", {"tokens": 32_768}),
        aims=(_cpu(1 / 5), *PEAK),
        note="A prompt is held as int32 beside the text that is made from it. The strict ratio "
        "can therefore not be below 1.64 here, and the whole ratio not below 1.29 for an "
        "array.",
    )
    for kind in ("list", "array")
]

_TOP_20_AIMS = (_cpu(1 / 5), *PEAK)


def _beside_bare(function: str) -> tuple[Contestant, ...]:
    """As `_calls` for the top 20, with the least that Python needs before the rival."""
    *others, rival = _calls(function, TOP_20)
    job = Call(f"benchmarks.workloads.bare_python:{function}", TOP_20)
    return (*others, Contestant(BARE, "ours", job, is_yardstick=True), rival)


ANSWERS = [
    Benchmark(
        name=name,
        group="Sample responses: decode",
        title=title,
        contestants=contestants,
        aims=aims,
        note="Top-20: 4,096 positions with 20 ids and logprobs each. The official SDK creates "
        "arrays when it decodes; ours share the memory of the reply. The official "
        "`topk_logprobs` is a list that is built on first use; ours builds a row when that "
        "row is read. *Bare Python* creates the same numbers from plain memory: the least "
        "that Python needs for the numbers themselves.",
    )
    for name, title, contestants, aims in (
        ("answer-arrays", "4,096 tokens, arrays", _calls("answer_arrays", ANSWER), PEAK),
        ("answer-lists", "4,096 tokens, lists", _calls("answer_lists", ANSWER), ()),
        ("top20-decode", "top-20, nothing read yet", _calls("topk_decode", TOP_20), _TOP_20_AIMS),
        ("top20-arrays", "top-20, arrays", _calls("topk_arrays", TOP_20), _TOP_20_AIMS),
        ("top20-read", "top-20, each cell read once", _beside_bare("topk_read"), (_cpu(1 / 5),)),
        ("top20-lists", "top-20, all as lists", _beside_bare("topk_lists"), (_cpu(1 / 5),)),
    )
]

RESULTS = [
    Benchmark(
        name="output-arrays",
        group="Training results: decode",
        title="128 × 4,096 logprobs, arrays",
        contestants=_calls("output_arrays", OUTPUT),
        aims=LARGE_PEAK,
    ),
    Benchmark(
        name="output-lists",
        group="Training results: decode",
        title="128 × 4,096 logprobs, `.data` of all",
        contestants=_calls("output_lists", OUTPUT),
    ),
]

_START = "Start and weight"
_START_NOTE = "Times are for the whole process, including the start of the interpreter."
_ALL_NAMES = "import {0}\nfor name in {0}.__all__: getattr({0}, name)"


def _python(code: str) -> Command:
    return Command("python", ("-c", code))


def _room(package: str) -> Figures:
    return Figures("benchmarks.workloads.installation:room", {"package": package})


def _imported(package: str) -> Figures:
    return Figures("benchmarks.workloads.installation:imported", {"package": package})


START = [
    Benchmark(
        name="import",
        group=_START,
        title="import alone",
        contestants=(
            _ours(OURS, _python("import tinsmith"), "core"),
            _rival(_python("import tinker")),
        ),
        aims=(_cpu(1 / 5),),
        shown=("cpu_s", "wall_s"),
        note=_START_NOTE,
    ),
    Benchmark(
        name="import-names",
        group=_START,
        title="import, every public name used",
        contestants=(
            _ours(OURS, _python(_ALL_NAMES.format("tinsmith")), "core"),
            _rival(_python(_ALL_NAMES.format("tinker"))),
        ),
        aims=(_cpu(1 / 5),),
        shown=("cpu_s", "wall_s"),
    ),
    Benchmark(
        name="help",
        group=_START,
        title="`--help`",
        contestants=(
            _ours(OURS, Command("tinsmith", ("--help",)), "core"),
            _rival(Command("tinker", ("--help",))),
        ),
        aims=(_cpu(1 / 5),),
        shown=("cpu_s", "wall_s"),
    ),
    Benchmark(
        name="resident",
        group=_START,
        title="memory, every public name used",
        contestants=(_ours(OURS, _imported("tinsmith"), "core"), _rival(_imported("tinker"))),
        shown=("resident_bytes",),
    ),
    Benchmark(
        name="size",
        group=_START,
        title="core install",
        contestants=(_ours(OURS, _room("tinsmith"), "core"), _rival(_room("tinker"))),
        aims=(Aim("installed_bytes", 1 / 5),),
        shown=("installed_bytes", "packages"),
    ),
    Benchmark(
        name="size-extras",
        group=_START,
        title="install with numpy and orjson",
        contestants=(_ours(OURS, _room("tinsmith")), _rival(_room("tinker"))),
        shown=("installed_bytes", "packages"),
    ),
]

CODEC = [
    Benchmark(
        name=name,
        group="Our codec beside the protobuf library",
        title=title,
        contestants=_codec(ours, library, sizes),
        note="The same messages, with arrays in memory beforehand. Ours starts from and ends in "
        "tinsmith's types; the library takes and gives bare arrays.",
    )
    for name, title, ours, library, sizes in (
        ("codec-encode", "encode 1 datum of 32,768", "codec_encode", "encode", LONG),
        ("codec-encode-batch", "encode 64 datums of 32,768", "codec_encode", "encode", BATCH),
        ("codec-encode-small", "encode 1,024 datums of 64", "codec_encode", "encode", SMALL),
        (
            "codec-decode",
            "decode 64 datums of 32,768",
            "codec_decode_request",
            "decode_request",
            BATCH,
        ),
        (
            "codec-decode-small",
            "decode 1,024 datums of 64",
            "codec_decode_request",
            "decode_request",
            SMALL,
        ),
        ("codec-decode-top20", "decode 4,096 × top-20", "codec_decode_topk", "decode_topk", TOP_20),
        (
            "codec-decode-output",
            "decode 128 × 4,096 logprobs",
            "codec_decode_output",
            "decode_output",
            OUTPUT,
        ),
    )
]

EXTENDED, CORE = "tinsmith, extensions", "tinsmith, core install"
PREPARED = "prepared bytes"
_VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "": ("", {}),
    "-own": (", each of its own prompt", {"prompts": "own"}),
    "-quick": (", from a server that takes 2 ms", {"delay_ms": "2"}),
}
"""How they differ from the usual, in words and in parameters."""
_LOADS = ((1, 100), (50, 500), (400, 1000), (2000, 2000))
"""How many samples are in flight, and how many are drawn in all."""
_CLIENT = "The client at work"
_CLIENT_NOTE = (
    "The server is a process of its own that takes 20 ms for a sample and reads as little as "
    "possible. Added latency is what the caller waited beyond that. Wall time is per sample. Both "
    "SDKs use the session poll. *Extensions* are those between our client and our service "
    "(docs/extensions.md). *Core install* has no orjson. *Prepared bytes* sends requests that were "
    "encoded before and ignores the replies: no client can be faster on this machine. Where the "
    "server's share of a core is near 1, the server is the limit, not the client. With 50 in "
    "flight the 20 ms are the limit, so the aim for throughput is checked with a server that takes "
    "2 ms. With one in flight, the core sleeps before each reply, and the same work costs several "
    "times as much as in a burst. Samples share one prompt, as those of a group do; where each has "
    "its own, creating it from a list is included."
)


def _client(package: str, function: str, **parameters: str) -> Figures:
    told = {"package": package, "server_python": str(PYTHONS["server"]), **parameters}
    return Figures(f"benchmarks.workloads.client:{function}", told)


def _samples(tokens: int, in_flight: int, count: int, variant: str = "") -> Benchmark:
    in_words, parameters = _VARIANTS[variant]
    sizes = {"tokens": str(tokens), "in_flight": str(in_flight), "count": str(count)} | parameters
    ours = _client("tinsmith", "samples", **sizes)
    aims = [Aim("cpu_s", 1 / 10, of=OURS), Aim("cpu_s", 1 / 25, of=EXTENDED)]
    # There the server's 20 ms make 0.4 ms of each sample: as much as a tenth of tinker's.
    is_bound_by_delay = in_flight == 1 or (tokens == 1000 and in_flight == 50 and not variant)
    if not is_bound_by_delay:
        aims += [Aim("wall_s", 1 / 10, of=OURS), Aim("wall_s", 1 / 10, of=EXTENDED)]
    if not variant:
        aims += [Aim("resident_bytes", 1 / 3, of=OURS), Aim("threads", 1 / 3, of=OURS)]
    told = {"server_python": str(PYTHONS["server"]), **sizes}
    prepared = Figures("benchmarks.workloads.bare_client:samples", told)
    return Benchmark(
        name=f"client-{tokens // 1000}k-{in_flight}{variant}",
        group=_CLIENT,
        title=f"samples of {tokens:,} tokens, {in_flight:,} in flight{in_words}",
        contestants=(
            _ours(OURS, ours),
            _ours(EXTENDED, _client("tinsmith", "samples", extensions="yes", **sizes)),
            _ours(CORE, ours, "core"),
            Contestant(PREPARED, "server", prepared, is_yardstick=True),
            _rival(_client("tinker", "samples", **sizes)),
        ),
        aims=tuple(aims),
        shown=(
            "cpu_s",
            "wall_s",
            "added_p50_s",
            "added_p99_s",
            "server_share",
            "threads",
            "resident_bytes",
        ),
        note=_CLIENT_NOTE,
        most_rounds=3,
    )


CLIENT = [
    *(_samples(1000, in_flight, count) for in_flight, count in _LOADS),
    *(_samples(32_768, in_flight, max(50, count // 4)) for in_flight, count in _LOADS),
    _samples(1000, 50, 500, "-quick"),
    _samples(1000, 400, 1000, "-own"),
    _samples(32_768, 400, 250, "-own"),
    Benchmark(
        name="client-busy-thread",
        group=_CLIENT,
        title="samples of 1,000 tokens, 400 in flight, beside a busy Python thread",
        contestants=(
            _ours(OURS, _client("tinsmith", "beside_busy_thread", count="4000")),
            _ours(
                EXTENDED,
                _client("tinsmith", "beside_busy_thread", count="8000", extensions="yes"),
            ),
            _rival(_client("tinker", "beside_busy_thread", count="400")),
        ),
        aims=(Aim("slowdown", 2.0, "itself"),),
        shown=("slowdown", "wall_s"),
        most_rounds=3,
    ),
    Benchmark(
        name="client-submit",
        group=_CLIENT,
        title="a call of `sample` until it returns, 400 in a row",
        contestants=(
            _ours(OURS, _client("tinsmith", "submissions", count="400")),
            _ours(CORE, _client("tinsmith", "submissions", count="400"), "core"),
            _rival(_client("tinker", "submissions", count="400")),
        ),
        # S1, whatever the rival takes: a loop that submits must never be held up.
        aims=(Aim("latency_p99_s", 0.001, "itself"),),
        shown=("latency_p50_s", "latency_p99_s"),
        most_rounds=5,
    ),
    Benchmark(
        name="client-batch",
        group=_CLIENT,
        title="forward_backward of 64 × 32,768 tokens, from lists",
        contestants=(
            _ours(OURS, _client("tinsmith", "batch", tokens="32768", datums="64")),
            _rival(_client("tinker", "batch", tokens="32768", datums="64")),
        ),
        aims=(_cpu(1 / 3),),
        shown=("cpu_s", "wall_s", "server_share", "resident_peak_bytes"),
    ),
    Benchmark(
        name="client-start",
        group=_CLIENT,
        title="from nothing loaded to the first sample",
        contestants=(
            _ours(OURS, _client("tinsmith", "first_answer")),
            _ours(CORE, _client("tinsmith", "first_answer"), "core"),
            _rival(_client("tinker", "first_answer")),
        ),
        shown=("cpu_s", "wall_s", "resident_bytes"),
    ),
]

SYNCED_FILE = "a file, synced for each row"
SHARED_SYNC = "a file, one sync for many rows"
_LEDGER_NOTE = (
    "Wall time is per durable append. The rivals append the same bytes to a file and sync it, with "
    "the same callers: after each row, which is the rate of the disk, or once for all rows that "
    "arrived in the meantime. Neither has an identity or an index. The aim is half of the disk's "
    "rate."
)


def _ledger(callers: int, size: int, title: str) -> Benchmark:
    def job(store: str) -> Figures:
        told = {"store": store, "callers": str(callers), "size": str(size)}
        return Figures("benchmarks.workloads.ledger:appends", told)

    return Benchmark(
        name=f"ledger-{callers}-{size // 1000}k",
        group="The ledger",
        title=title,
        contestants=(
            _ours(OURS, job("ledger")),
            Contestant(SHARED_SYNC, "ours", job("file"), is_yardstick=True),
            _ours(SYNCED_FILE, job("each")),
        ),
        aims=(Aim("wall_s", 2.0),),
        shown=("wall_s", "latency_p50_s", "latency_p99_s", "cpu_s"),
        note=_LEDGER_NOTE,
        most_rounds=5,
    )


LEDGER = [
    _ledger(1, 2000, "append 2 kB, one caller"),
    _ledger(64, 2000, "append 2 kB, 64 callers"),
    _ledger(16, 200_000, "append 200 kB, 16 callers"),
]

IN_MEMORY, EMPTY_START = "tinsmith, with a ledger in memory", "an empty start"
_SERVICE_NOTE = (
    "`tinsmith serve` with the fake engine and SQLite, in its own process, on the same two cores "
    "as the clients. CPU is the server's, per command. A command is an optimizer step: submitted, "
    "made durable, run, settled, and its result fetched. The rival is the same service with a "
    "ledger in memory, which shows what durability costs."
)


def _service(
    function: str, name: str, title: str, shown: tuple[Metric, ...], *aims: Aim, **told: str
) -> Benchmark:
    target = f"benchmarks.workloads.service:{function}"
    return Benchmark(
        name=f"service-{name}",
        group="The service",
        title=title,
        contestants=(
            _ours(OURS, Figures(target, told), "server"),
            _ours(IN_MEMORY, Figures(target, {**told, "database": "memory:"}), "server"),
        ),
        aims=aims,
        shown=shown,
        note=_SERVICE_NOTE,
        most_rounds=3,
    )


_RECOVERY = "benchmarks.workloads.service:recovery"
_COMMANDS: tuple[Metric, ...] = ("wall_s", "latency_p50_s", "latency_p99_s", "cpu_s")
SERVICE = [
    _service(
        "commands",
        "1-client",
        "one client, one command at a time",
        _COMMANDS,
        Aim("latency_p50_s", 0.005, "itself", of=OURS),
        clients="1",
        count="500",
    ),
    _service(
        "commands",
        "32-clients",
        "32 clients, four commands each at a time",
        _COMMANDS,
        Aim("wall_s", 0.001, "itself", of=OURS),
        clients="32",
        count="6000",
        in_flight="4",
    ),
    _service(
        "idle_polls",
        "idle",
        "1,000 polls held, with the memory of each",
        ("server_share", "resident_bytes"),
        count="1000",
    ),
    Benchmark(
        name="service-recovery",
        group="The service",
        title="from a start after kill -9 to ready, 10,000 commands",
        contestants=(
            _ours(OURS, Figures(_RECOVERY, {"count": "10000"}), "server"),
            _ours(EMPTY_START, Figures(_RECOVERY, {"count": "0"}), "server"),
        ),
        shown=("wall_s",),
        most_rounds=3,
    ),
    _service(
        "load",
        "load",
        "2,000 samples and 512 passes of 500 kB under way, 50 sessions that beat",
        ("wall_s", "latency_p50_s", "slowest_s", "cpu_s", "resident_peak_bytes"),
        Aim("slowest_s", 1.0, "itself", of=OURS),
        samples="2000",
        passes="512",
        sessions="50",
        body_bytes="500000",
    ),
]

MAIN_PAGE = Page(
    name="latest",
    published="benchmarks.md",
    title="Benchmarks of the client and service",
    benchmarks=(
        *TRAINING,
        *SAMPLING,
        *ANSWERS,
        *RESULTS,
        *START,
        *CLIENT,
        *CODEC,
        *LEDGER,
        *SERVICE,
    ),
)
PAGES = (MAIN_PAGE, ENGINE_PAGE)
BENCHMARKS = [benchmark for page in PAGES for benchmark in page.benchmarks]
