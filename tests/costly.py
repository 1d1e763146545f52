"""Properties of which one example takes a tenth of a second or more."""

import hypothesis


def costly(quick: int) -> hypothesis.settings:
    """So many examples in `make test`; where more are asked for (--examples), more by the same factor."""
    return hypothesis.settings(max_examples=max(1, quick * hypothesis.settings().max_examples // 25))
