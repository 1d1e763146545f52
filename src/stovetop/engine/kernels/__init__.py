"""Computations on tensors alone: they know no model, no adapter and no request."""
