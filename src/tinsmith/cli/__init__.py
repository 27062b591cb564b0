"""The `tinsmith` command: one module for each noun."""
