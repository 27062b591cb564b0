from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tinsmith import __version__
from tinsmith.observe.instruments import Counter
from tinsmith.observe.metrics import ServiceMetrics


def test_metric_names_and_help_texts_follow_the_conventions() -> None:
    for instrument in ServiceMetrics().registry:
        assert re.fullmatch(r"(tinsmith|process)_[a-z_]+", instrument.name)
        assert instrument.text.endswith("."), instrument.name
        assert instrument.name.endswith("_total") == (instrument.kind == "counter")


def test_two_services_in_one_process_count_separately() -> None:
    first, second = ServiceMetrics(), ServiceMetrics()

    first.unauthorised.add(1)

    assert "\ntinsmith_unauthorised_total 1.0\n" in first.exposition()
    assert "\ntinsmith_unauthorised_total 0.0\n" in second.exposition()


def test_the_exposition_parses_and_has_version_and_process_metrics() -> None:
    metrics = ServiceMetrics()
    metrics.http_requests.add(1, "asample", "200")
    metrics.http_seconds.observe(0.01, "asample")

    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(metrics.exposition())
        for sample in family.samples
    }

    assert samples["tinsmith_build_info"].labels == {"version": __version__}
    assert samples["process_cpu_seconds_total"].value > 0
    assert samples["process_resident_memory_bytes"].value > 1e6
    assert samples["process_open_fds"].value > 2
    assert samples["tinsmith_http_requests_total"].value == 1


def test_every_attribute_is_an_instrument_of_the_registry() -> None:
    metrics = ServiceMetrics()
    known = set(metrics.registry)

    attributes = [
        value for name, value in vars(metrics).items() if name not in ("registry", "_figures")
    ]

    assert all(value in known for value in attributes)
    assert any(isinstance(value, Counter) for value in attributes)


def test_statistics_are_read_at_scrape_time() -> None:
    metrics = ServiceMetrics()
    figures = {"batches": 3.0, "adapters": 2.0, "of no metric": 1.0}
    metrics.read_figures(lambda: figures)

    before = metrics.exposition()
    figures["batches"] = 4.0

    assert "\ntinsmith_batches_total 3.0\n" in before
    assert "\ntinsmith_adapters 2.0\n" in before
    assert "\ntinsmith_batches_total 4.0\n" in metrics.exposition()
    assert "of no metric" not in before


def test_the_exposition_has_the_names_listed_in_the_reference() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    listed = set(re.findall(r"`((?:tinsmith|process)_[a-z_]+)`", page.read_text(encoding="utf-8")))

    named = set(re.findall(r"^# TYPE (\S+)", ServiceMetrics().exposition(), re.MULTILINE))

    assert named == listed
