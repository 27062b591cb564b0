"""Runs, checkpoints and sessions: what `RestClient` and `AdminClient` are made of."""
