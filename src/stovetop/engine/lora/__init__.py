"""Low-rank adapters: `weights.py` has their tensors as values, `low_rank.py` what they add to linears, forward and
backward, `routing.py` which rows of a pass meet which adapter, and `linear.py` the linears that they act on.

Read them in this order. They import `kernels/` and nothing else of the engine.
"""
