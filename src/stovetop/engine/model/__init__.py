"""The base model: from files (`loading.py`), and taken over from the library (`adopting.py`) or refused by name, at
sight (`refusals.py`) or for what small copies compute (`proving.py`, `exactness.py`; `cutting.py` makes them). Then
frozen (`base_model.py`), with a place for adapters beside its linears (`targets.py`), decoder layers of ours
(`flat_decoder.py`) or our attention in those of the library (`attention.py`), a head that needs no logits of the whole
pass (`head.py`), and one pass of decoding (`decoding.py`). Read `base_model.py` first. It imports `kernels/`, `lora/`.
"""
