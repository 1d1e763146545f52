"""The engine: base model, adapters, training and sampling, synchronous. Torch lives here; importing this package alone
does not load it. Read `engine.py` first, then `ops.py`, which says what can be asked of it."""
