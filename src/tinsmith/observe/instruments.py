"""Counters, gauges and histograms that `prometheus_client` collects and writes.

The instruments are ours because a gauge here may read labelled values from elsewhere, and because
the number of series is bounded: beyond `MAX_SERIES` new label values are counted together under
`other`. `metrics.py` has the names.

Every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MAX_SERIES = 1000
OTHER = "other"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bounds for times, from a command with nothing to do to a long step."""

Labels: TypeAlias = tuple[str, ...]
"""Values of labels, in the order of their names."""


class Instrument:
    """What all kinds share: a name, a sentence, and the names of labels."""

    kind = ""

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.label_names = label_names
        self._lock = threading.Lock()

    def collect(self) -> Metric:
        """The values now, as `prometheus_client` has them."""
        raise NotImplementedError

    def _new_series(self, labels: Labels, known: int) -> Labels:
        """The series that a label never seen before goes to; checks that it fits."""
        if len(labels) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not {len(labels)}")
        return labels if known < MAX_SERIES else (OTHER,) * len(labels)


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

    def collect(self) -> Metric:
        """The values now, as `prometheus_client` has them."""
        family = CounterMetricFamily(self.name, self.text, labels=self.label_names)
        with self._lock:
            for labels, value in self._values.items():
                family.add_metric(_sendable(labels), value)
        return family


Read: TypeAlias = Callable[[], float | Mapping[Labels, float]]
"""Gives a gauge's value, or its values by their labels."""


class Gauge(Instrument):
    """Something that goes up and down."""

    kind = "gauge"
    _family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily

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

    def collect(self) -> Metric:
        """The values now, as `prometheus_client` has them."""
        family = self._family(self.name, self.text, labels=self.label_names)
        for labels, value in self._now().items():
            family.add_metric(_sendable(labels), value)
        return family

    def _now(self) -> dict[Labels, float]:
        if self._read is not None:
            read = self._read()
            return dict(read) if isinstance(read, Mapping) else {(): read}
        with self._lock:
            return dict(self._values)


class ReadCounter(Gauge):
    """A counter that something else keeps; it is only read here."""

    kind = "counter"
    _family = CounterMetricFamily


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

    def collect(self) -> Metric:
        """The values now, as `prometheus_client` has them."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.label_names)
        with self._lock:
            found = [(labels, list(c), s[0]) for labels, (c, s) in self._series.items()]
        for labels, counts, total in found:
            texts = (f"{bound:g}" if bound < math.inf else "+Inf" for bound in self.bounds)
            buckets = list(zip(texts, itertools.accumulate(counts), strict=True))
            family.add_metric(_sendable(labels), buckets, total)
        return family

    def _empty(self) -> tuple[list[int], list[float]]:
        return [0] * len(self.bounds), [0.0]


InstrumentT = TypeVar("InstrumentT", bound=Instrument)


class Registry(Collector):
    """The instruments of one service, in the order in which they were made."""

    def __init__(self) -> None:
        self._instruments: dict[str, Instrument] = {}

    def __iter__(self) -> Iterator[Instrument]:
        return iter(self._instruments.values())

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter; its name ends in `_total`."""
        assert name.endswith("_total"), "Prometheus names counters so"
        return self._added(Counter(name, text, labels))

    def read_counter(self, name: str, text: str, *labels: str) -> ReadCounter:
        """Make a counter that something else keeps."""
        assert name.endswith("_total"), "Prometheus names counters so"
        return self._added(ReadCounter(name, text, labels))

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Make a gauge."""
        return self._added(Gauge(name, text, labels))

    def histogram(
        self, name: str, text: str, *labels: str, bounds: Iterable[float] = SECONDS
    ) -> Histogram:
        """Make a histogram."""
        return self._added(Histogram(name, text, labels, bounds=bounds))

    def collect(self) -> Iterator[Metric]:
        """All values, for `prometheus_client`."""
        for instrument in self:
            yield instrument.collect()

    def exposition(self) -> str:
        """All values, in the text format of Prometheus."""
        collected = CollectorRegistry()
        collected.register(self)
        return generate_latest(collected).decode()

    def _added(self, instrument: InstrumentT) -> InstrumentT:
        assert instrument.name not in self._instruments, "names are unique"
        self._instruments[instrument.name] = instrument
        return instrument


def _sendable(labels: Labels) -> list[str]:
    """The labels with lone surrogates escaped, which UTF-8 does not have."""
    return [str(text).encode("utf-8", "backslashreplace").decode() for text in labels]
