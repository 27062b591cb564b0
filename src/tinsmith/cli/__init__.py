"""The `tinsmith` command: one module per noun."""
