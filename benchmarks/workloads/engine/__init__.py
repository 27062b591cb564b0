"""The embedded engine beside what else trains and samples on a CPU.

`ours.py` drives `EmbeddedEngine` through its interface, as a service does; the other modules have
one rival each. All start from the same models (`models.py`) and the same numbers (`data.py`), and
tell the same figures (`measure.py`). One thread each.
"""
