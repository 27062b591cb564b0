"""Runs, checkpoints and sessions: the components of `RestClient` and `AdminClient`."""
