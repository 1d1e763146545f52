"""A deterministic fake of the whole service, for tests: yours too. It is a real backend with a tiny model behind it.

service.py         `open_service`, and the engine of it: when calls run, and what goes wrong in them
bigram.py          the model: a bigram table, its losses, its optimizer, its samples
byte_tokenizer.py  its tokenizer           failing_disk.py  a disk that fails when it is told to
"""

from stovetop.backends.recording.service import Fault, Latency, NonFiniteGradient, Raises, Verb, open_service

__all__ = ["Fault", "Latency", "NonFiniteGradient", "Raises", "Verb", "open_service"]
