"""docs/engine.md follows a datum and a prompt through the engine: every function that it names is called on the way."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from engine import tiny
from stovetop.engine import ops
from stovetop.losses import CrossEntropy
from stovetop.types import AdamParams, LoraConfig, ModelInput, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def named_in(title: str) -> set[str]:
    """The functions in the table below this title."""
    [section] = re.findall(rf"^## {title}\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {name for row in section.splitlines() for name in re.findall(r"`([A-Za-z_.]+)`", row)}
    return {name for name in names if name not in ("ForwardBackward", "Sample", "Linear")}


class Called:
    """The qualified names of the engine's functions that are called within."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> "Called":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("stovetop.engine"):
            self.names.add(frame.f_code.co_qualname)


@pytest.fixture(autouse=True)
def no_other_profile() -> None:
    assert sys.getprofile() is None


def test_a_datum_becomes_a_gradient_by_the_functions_of_the_page() -> None:
    engine = tiny.engine()
    adapter = tiny.create(engine, LoraConfig(rank=4, train_unembed=False))
    data = [tiny.datum(tiny.tokens(20, seed)) for seed in range(2)]
    with Called() as called:
        tiny.run(engine, ops.ForwardBackward(adapter, data, CrossEntropy()))
        tiny.run(engine, ops.OptimStep(adapter, AdamParams()))
    named = named_in("A datum becomes a gradient")
    assert len(named) > 15
    backward = {name for name in named if name.endswith(".backward")}  # autograd calls these in a thread of its own
    assert named - backward <= called.names
    assert {name.replace(".backward", ".forward") for name in backward} <= called.names


def test_a_prompt_becomes_tokens_by_the_functions_of_the_page() -> None:
    engine = tiny.engine()
    prompt = tiny.tokens(130, 0)
    params = SamplingParams(max_tokens=3, seed=0)
    with Called() as called:
        for length in (100, 130):
            tiny.run(engine, ops.Sample(None, ModelInput.from_ints(prompt[:length]), 4, params, False, 0))
    named = named_in("A prompt becomes tokens")
    assert len(named) > 15
    assert named <= called.names
