"""What carries requests to a service: one promise, and ways to keep it."""
