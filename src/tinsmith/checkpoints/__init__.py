"""Saved weights: files on a disk or at an fsspec URL.

`base.py` has what every store promises, `paths.py` how checkpoints are named, `registry.py` opens a
store by its address. `format.py` says which files a checkpoint has and reads and writes them.

Knows files. Knows nothing of HTTP, of the ledger, and of torch.
"""
