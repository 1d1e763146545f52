"""Sampling, by continuous batching: `sampler.py` says what a step does. `prompts.py` computes prompts in chunks, of
which `waiting.py` knows the order and `kept.py` is the prefix cache; `batch.py` is the running batch, `drawing.py` and
`stops.py` what becomes of its logits. `kv_budget.py` and `kv_memory.py` bound the memory; `halves.py` and
`not_finite.py` find the request that a failure belongs to. Read `sampler.py` first. Of the other folders it imports
`kernels/`, `lora/` and `model/`.
"""
