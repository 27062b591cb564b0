"""Losses of the user's own: taken here between two passes, composed of terms, or sent as data."""
