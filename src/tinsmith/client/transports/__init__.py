"""Transports: how requests get to a service."""
