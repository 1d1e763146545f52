"""What an engine counts of what it does."""

from engine import tiny
from stovetop.engine import ops
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig, ModelInput, SamplingParams


def test_passes_tokens_and_steps_are_counted_with_their_seconds() -> None:
    engine = tiny.engine(max_tokens_per_pass=10)
    adapter = tiny.create(engine, LoraConfig(rank=2))
    before = engine.counts.num_training_passes
    data = [tiny.datum(tiny.tokens(9, seed)) for seed in range(3)]  # eight tokens each: one in a pass
    tiny.run(engine, ops.ForwardBackward(adapter, data, CrossEntropy()))
    counts = engine.counts
    assert counts.num_training_passes == before + 3
    assert counts.num_trained_tokens == 3 * 8
    assert counts.training_s > 0
    assert (counts.num_sampling_steps, counts.sampling_s) == (0, 0.0)
    tiny.run(engine, ops.Sample(None, ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(4, 0, []), False, 0))
    assert counts.num_sampling_steps >= 4
    assert counts.sampling_s > 0
    assert counts.num_training_passes == before + 3


def test_adapters_that_are_moved_away_and_back_are_counted() -> None:
    engine = tiny.engine(max_adapter_bytes=1)  # room for none but that in use
    first, second = (tiny.create(engine, LoraConfig(rank=2, seed=seed)) for seed in range(2))
    data = [tiny.datum(tiny.tokens(9, 0))]
    tiny.run(engine, ops.Forward(first, data, CrossEntropy()))
    before = engine.counts.num_adapters_moved
    tiny.run(engine, ops.Forward(second, data, CrossEntropy()))
    tiny.run(engine, ops.Forward(first, data, CrossEntropy()))
    assert engine.counts.num_adapters_moved > before
