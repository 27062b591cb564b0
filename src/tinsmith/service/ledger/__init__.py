"""What was asked of the service and how it ended, durable before it is answered.

`base.py` has the promises, `records.py` what is kept, `registry.py` opens a variant by its address.
"""
