"""Sampling, by continuous batching: `sampler.py` says what a step does, `request.py` what it works on. `prompts.py`
computes prompts in chunks, in the order of `waiting.py`, with `prefix_cache.py`. From `ready.py` their samples enter
the running batch, `batch.py`, when `admission.py` lets them; `drawing.py` and `stops.py` make tokens of its logits.
`kv_budget.py` and `kv_memory.py` bound the memory; `halves.py` and `not_finite.py` find the request that a failure
belongs to. Read them in this order. Of the other folders it imports `kernels/`, `lora/` and `model/`.
"""
