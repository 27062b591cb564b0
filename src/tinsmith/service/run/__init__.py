"""Puts the service together: settings, assembly and life. Loads nothing before it is asked to."""
