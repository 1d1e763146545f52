"""Computations on tensors alone: they know no model, no adapter and no request, and import nothing else of the engine.

Read `packing.py` (sequences to one row), `sight.py` (which row sees which key), `attention_plans.py` (training, prefill
and decoding as three plans), then `arithmetic.py` (the two ways to compute them) and `block_attention.py` under it.
`layer_math.py` is the rest of a decoder layer. `kv_cache.py` and `shared_prefix.py` hold keys and values;
`row_groups.py` is for rows that meet something of their own.
"""
