"""Seeds made of a seed and of what they are for: what is drawn for one thing then depends on nothing else that is
drawn, and no two things are drawn with the same random numbers."""

import hashlib


def seed_for(*parts: object) -> int:
    """A seed, 63 bits, that depends on these, by how they are printed."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
