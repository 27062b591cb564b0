"""Samples in flight: numbered, sent, fetched, streamed, cancelled."""
