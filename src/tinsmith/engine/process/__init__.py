"""An engine in a process of its own, which is an engine itself to its caller."""
