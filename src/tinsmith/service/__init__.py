"""The service: from an HTTP request to a settled future."""
