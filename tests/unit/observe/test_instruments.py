from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tinsmith.observe.instruments import MAX_SERIES, OTHER, Registry


def parsed(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The values as the usual library reads them from our text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.exposition())
        for sample in family.samples
    }


def test_recorded_values_are_exposed() -> None:
    registry = Registry()
    requests = registry.counter("requests_total", "Requests.", "endpoint", "status")
    waiting = registry.gauge("waiting", "Waiting.")

    requests.add(1, "sample", "200")
    requests.add(2, "sample", "200")
    requests.add(1, "sample", "429")
    waiting.add(3)
    waiting.add(-1)

    assert parsed(registry) == {
        ("requests_total", (("endpoint", "sample"), ("status", "200"))): 3,
        ("requests_total", (("endpoint", "sample"), ("status", "429"))): 1,
        ("waiting", ()): 2,
    }


def test_the_exposition_has_the_type_and_help_of_each_metric() -> None:
    registry = Registry()
    registry.counter("a_total", 'One\nline, a \\ and a "quote".')
    registry.gauge("b", "B.")
    registry.histogram("c", "C.")
    registry.read_counter("d_total", "D.").read_with(lambda: 5)

    families = {
        family.name: family for family in text_string_to_metric_families(registry.exposition())
    }

    kinds = {name: family.type for name, family in families.items()}
    assert kinds == {"a": "counter", "b": "gauge", "c": "histogram", "d": "counter"}
    assert families["a"].documentation == 'One\nline, a \\ and a "quote".'


def test_a_histogram_counts_each_value_in_its_bucket_and_above() -> None:
    registry = Registry()
    took = registry.histogram("took", "Took.", "kind", bounds=(1, 10))

    for value in (0.5, 1, 1.5, 10, 11, math.inf):
        took.observe(value, "x")
    took.observe(math.nan, "x")

    found = parsed(registry)
    buckets = [found["took_bucket", (("kind", "x"), ("le", le))] for le in ("1", "10", "+Inf")]
    assert buckets == [2, 4, 6]
    assert found["took_count", (("kind", "x"),)] == 6
    assert found["took_sum", (("kind", "x"),)] == math.inf


def test_metrics_without_labels_are_exposed_as_zero_from_the_start() -> None:
    registry = Registry()
    registry.counter("a_total", "A.")
    registry.histogram("b", "B.")

    found = parsed(registry)

    assert found["a_total", ()] == 0
    assert found["b_count", ()] == 0


@given(st.text(), st.floats(allow_nan=False))
def test_any_label_and_any_value_round_trip(label: str, value: float) -> None:
    registry = Registry()
    registry.gauge("g", "G.", "name").set(value, label)

    [(name, read)] = parsed(registry).items()

    sendable = label.encode("utf-8", "backslashreplace").decode()
    assert name == ("g", (("name", sendable),))
    assert read == value


def test_a_gauge_can_be_computed_when_it_is_read() -> None:
    registry = Registry()
    queue: list[int] = []
    registry.gauge("length", "Length.").read_with(lambda: len(queue))
    registry.gauge("by_state", "By state.", "state").read_with(lambda: {("a",): 1.0, ("b",): 2.0})
    queue.append(1)

    found = parsed(registry)

    assert found["length", ()] == 1
    assert found["by_state", (("state", "b"),)] == 2


def test_label_values_beyond_the_limit_share_one_series() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "A.", "name")
    gauge = registry.gauge("b", "B.", "name")
    histogram = registry.histogram("c", "C.", "name", bounds=(1,))

    for number in range(MAX_SERIES + 100):
        counter.add(1, str(number))
        gauge.set(1, str(number))
        histogram.observe(1, str(number))
    counter.add(1, "0")

    found = parsed(registry)
    assert found["a_total", (("name", OTHER),)] == 100
    assert found["a_total", (("name", "0"),)] == 2
    assert found["c_count", (("name", OTHER),)] == 100
    assert len(found) == (MAX_SERIES + 1) * (1 + 1 + 4)


def test_wrong_labels_raise() -> None:
    counter = Registry().counter("a_total", "A.", "name")

    with pytest.raises(ValueError, match="labels"):
        counter.add(1)
    with pytest.raises(ValueError, match="labels"):
        counter.add(1, "a", "b")


def test_no_count_is_lost_between_threads() -> None:
    registry = Registry()
    counter = registry.counter("a_total", "A.", "name")
    histogram = registry.histogram("b", "B.")

    def count() -> None:
        for _ in range(2000):
            counter.add(1, "x")
            histogram.observe(0.1)
            registry.exposition() if _ % 500 == 0 else None

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = parsed(registry)
    assert found["a_total", (("name", "x"),)] == 16_000
    assert found["b_count", ()] == 16_000
