"""The version, in the one place that packaging and the running code both read."""

__version__ = "0.2.0"
