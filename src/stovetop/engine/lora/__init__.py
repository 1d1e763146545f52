"""Low-rank adapters: their tensors as values, the linear that they act on, and which rows of a pass meet which."""
