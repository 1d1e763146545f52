"""The base model: from files (`loading.py`) or refused by name (`proving.py`, `exactness.py`, on small copies that
`cutting.py` makes); then frozen (`base_model.py`), with a place for adapters beside its linears (`targets.py`), decoder
layers of ours (`flat_decoder.py`) or our attention in those of the library (`attention.py`), a head that needs no
logits of the whole pass (`head.py`), and one pass of decoding (`decoding.py`). Read `base_model.py` first. Of the other
folders it imports `kernels/` and `lora/`.
"""
