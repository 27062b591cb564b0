"""Samples on their way: numbered, sent, fetched, streamed, given up."""
