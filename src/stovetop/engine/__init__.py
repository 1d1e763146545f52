"""The engine: base model, adapters, training and sampling, synchronous. Torch lives here; importing this package alone
does not load it. It imports nothing of Stovetop but the values and checks at its root (`types`, `losses`, `errors` ..).

Read `engine.py` first, then `ops.py`, which says what can be asked of it; docs/engine.md follows a datum and a prompt
through it. Then `training/`, `sampling/`, and below them `model/`, `lora/` and `kernels/`.

Suffixes of shapes, besides those of docs/glossary.md: `N` tokens of a pass; `E` hidden size; `V` vocabulary; `I` inputs
and `O` outputs of a linear; `R` rank; `H` query heads; `G` key/value heads; `D` head size; `Q` query rows and `L` key
rows of one attention call; `S` slots, segments or calls; `P` pairs (row, target), in `shared_prefix.py` prefixes; `K`
adapters, groups, or targets of a position; `M` rows of one of them; `B` rows that are drawn from; `C` a chunk of rows.
"""
