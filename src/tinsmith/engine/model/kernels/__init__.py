"""Compiled steps of the model on a CPU: `library.py` has them as functions of tensors."""
