"""Modules made from proto/tinsmith.proto by scripts/regenerate-proto."""
