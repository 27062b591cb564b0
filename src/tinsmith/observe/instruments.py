"""Counters, gauges and histograms, and their text for Prometheus.

A registry of our own: counting takes a third of the time that it takes in the usual library, which
looks each label up anew, and it brings nothing along. `metrics.py` has the names.

Every method may be called from any thread. Values of labels are few by intent; if something makes
many, those beyond `MOST_SERIES` are counted together under `other`, so that memory stays bounded.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_SERIES = 1000
OTHER = "other"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bounds for times, from a command with nothing to do to a long step."""

Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = tuple[str, Mapping[str, str], float]
"""A line of the text: a suffix to the name, labels, value."""


class Instrument:
    """What all kinds share: a name, a sentence, and the names of labels."""

    kind = ""

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.label_names = label_names
        self._lock = threading.Lock()

    def samples(self) -> Iterable[Sample]:
        """The values now."""
        raise NotImplementedError

    def _labelled(self, labels: Labels) -> dict[str, str]:
        return dict(zip(self.label_names, labels, strict=True))

    def _new_series(self, labels: Labels, known: int) -> Labels:
        """The series that a label never seen before goes to; checks that it fits."""
        if len(labels) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not {len(labels)}")
        return labels if known < MOST_SERIES else (OTHER,) * len(labels)


class Counter(Instrument):
    """Something that only grows."""

    kind = "counter"

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        super().__init__(name, text, label_names)
        self._values: dict[Labels, float] = {} if label_names else {(): 0}

    def add(self, amount: float, *labels: str) -> None:
        """Count so many more; the values of the labels in the order of their names."""
        with self._lock:
            try:
                self._values[labels] += amount
            except KeyError:
                labels = self._new_series(labels, len(self._values))
                self._values[labels] = self._values.get(labels, 0) + amount

    def value(self, *labels: str) -> float:
        """What was counted so far."""
        return self._values.get(labels, 0)

    def samples(self) -> Iterator[Sample]:
        """`Instrument.samples`."""
        with self._lock:
            found = list(self._values.items())
        for labels, value in found:
            yield "", self._labelled(labels), value


Read: TypeAlias = Callable[[], float | Mapping[Labels, float]]
"""Gives a gauge's value, or its values by their labels."""


class Gauge(Instrument):
    """Something that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        super().__init__(name, text, label_names)
        self._values: dict[Labels, float] = {}
        self._read: Read | None = None

    def set(self, value: float, *labels: str) -> None:
        """It is this now."""
        with self._lock:
            if labels not in self._values:
                labels = self._new_series(labels, len(self._values))
            self._values[labels] = value

    def add(self, change: float, *labels: str) -> None:
        """It is so much more now, or less."""
        with self._lock:
            if labels not in self._values:
                labels = self._new_series(labels, len(self._values))
            self._values[labels] = self._values.get(labels, 0) + change

    def read_with(self, read: Read) -> None:
        """Ask this function whenever the metrics are read. It must be quick and not wait."""
        self._read = read

    def value(self, *labels: str) -> float:
        """What it is now."""
        return self._now().get(labels, 0)

    def samples(self) -> Iterator[Sample]:
        """`Instrument.samples`."""
        for labels, value in self._now().items():
            yield "", self._labelled(labels), value

    def _now(self) -> dict[Labels, float]:
        if self._read is not None:
            read = self._read()
            return dict(read) if isinstance(read, Mapping) else {(): read}
        with self._lock:
            return dict(self._values)


class ReadCounter(Gauge):
    """A counter that something else keeps; it is only read here."""

    kind = "counter"


class Histogram(Instrument):
    """How often values were how large."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, label_names: Labels = (), *, bounds: Iterable[float] = SECONDS
    ) -> None:
        super().__init__(name, text, label_names)
        self.bounds = (*sorted(bounds), math.inf)
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}
        if not label_names:
            self._series[()] = self._empty()

    def observe(self, value: float, *labels: str) -> None:
        """Count a value."""
        if value != value:  # a NaN would stay in the sum for ever
            return
        place = bisect_left(self.bounds, value)
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                labels = self._new_series(labels, len(self._series))
                series = self._series.setdefault(labels, self._empty())
            series[0][place] += 1
            series[1][0] += value

    def count(self, *labels: str) -> int:
        """How many values there were."""
        return sum(self._series.get(labels, ([], []))[0])

    def samples(self) -> Iterator[Sample]:
        """`Instrument.samples`."""
        with self._lock:
            found = [(labels, list(c), s[0]) for labels, (c, s) in self._series.items()]
        for labels, counts, total in found:
            named = self._labelled(labels)
            running = 0
            for bound, count in zip(self.bounds, counts, strict=True):
                running += count
                yield "_bucket", {**named, "le": number_text(bound)}, running
            yield "_sum", named, total
            yield "_count", named, running

    def _empty(self) -> tuple[list[int], list[float]]:
        return [0] * len(self.bounds), [0.0]


InstrumentT = TypeVar("InstrumentT", bound=Instrument)


class Registry:
    """The instruments of one service, in the order in which they were made."""

    def __init__(self) -> None:
        self._instruments: dict[str, Instrument] = {}

    def __iter__(self) -> Iterator[Instrument]:
        return iter(self._instruments.values())

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter; its name ends in `_total`."""
        assert name.endswith("_total"), "so they are called by custom"
        return self._added(Counter(name, text, labels))

    def read_counter(self, name: str, text: str, *labels: str) -> ReadCounter:
        """Make a counter that something else keeps."""
        assert name.endswith("_total"), "so they are called by custom"
        return self._added(ReadCounter(name, text, labels))

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Make a gauge."""
        return self._added(Gauge(name, text, labels))

    def histogram(
        self, name: str, text: str, *labels: str, bounds: Iterable[float] = SECONDS
    ) -> Histogram:
        """Make a histogram."""
        return self._added(Histogram(name, text, labels, bounds=bounds))

    def exposition(self) -> str:
        """All values, as Prometheus reads them."""
        lines: list[str] = []
        for instrument in self:
            help_ = instrument.text.replace("\\", r"\\").replace("\n", r"\n")
            lines.append(f"# HELP {instrument.name} {help_}")
            lines.append(f"# TYPE {instrument.name} {instrument.kind}")
            for suffix, labels, value in instrument.samples():
                named = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
                shown = f"{{{named}}}" if named else ""
                lines.append(f"{instrument.name}{suffix}{shown} {number_text(value)}")
        return "\n".join(lines) + "\n"

    def _added(self, instrument: InstrumentT) -> InstrumentT:
        assert instrument.name not in self._instruments, "a name stands for one thing"
        self._instruments[instrument.name] = instrument
        return instrument


def number_text(value: float) -> str:
    """A number as Prometheus reads it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(text: str) -> str:
    # A half of a character cannot be sent.
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
