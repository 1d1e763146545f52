"""What has run on no device yet, only in simulations by the tests. It is off unless `ServiceClient(untried=...)` asks
for it by name; the rest of the engine does not import it.

    "captured_decoding"  captured.py          passes of decoding recorded as CUDA graphs
    "ragged_attention"   ragged_attention.py  training attends with torch's kernel for sequences of different lengths
"""
