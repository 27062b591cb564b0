"""Measures workloads of several contestants against each other; see benchmarks/README.md."""
