"""Low-rank adapters: `weights.py` has their tensors as values, `linear.py` the linear that they act on, `low_rank.py`
what they add to it, forward and backward, and `routing.py` which rows of a pass meet which adapter.

Read them in this order. They import `kernels/` and nothing else of the engine.
"""
