"""A fast, exact engine for tests: a table of logits instead of a network, and the full contract."""
