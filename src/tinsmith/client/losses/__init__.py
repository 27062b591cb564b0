"""Custom losses: computed on the client between two passes, composed of terms, or uploaded."""
