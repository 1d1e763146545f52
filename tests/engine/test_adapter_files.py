"""Adapters on disk: exact, readable by PEFT, torn ones recognised."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.adapter_files import read_adapter, write_adapter
from stovetop.engine.engine import Engine
from stovetop.engine.training import Adapter
from stovetop.errors import CheckpointError, TornCheckpoint
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig

META = {"base_model": "tiny", "fingerprint": "tiny"}
CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Engine:
    return tiny.engine()


@pytest.fixture
def adapter(engine: Engine) -> Adapter:
    """Trained for two steps, so that it has moments."""
    adapter = tiny.trained_adapter(engine, alpha=16.0)
    for seed in range(2):
        tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, seed))], CrossEntropy()))
        tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    return adapter


def test_what_is_read_is_what_was_written_to_the_bit(adapter: Adapter, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", adapter.weights, adapter.moments, META, overwrite=False)
    saved = read_adapter(tmp_path / "a", with_optimizer=True, device=CPU)
    assert saved.weights.config == adapter.weights.config
    assert saved.moments.step == 2
    for ours, theirs in (
        (adapter.weights.tensors, saved.weights.tensors),
        (adapter.moments.mean, saved.moments.mean),
        (adapter.moments.square, saved.moments.square),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_without_the_optimizer_moments_are_empty(adapter: Adapter, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", adapter.weights, adapter.moments, META, overwrite=False)
    assert read_adapter(tmp_path / "a", with_optimizer=False, device=CPU).moments.mean == {}
    write_adapter(tmp_path / "b", adapter.weights, None, META, overwrite=False)
    with pytest.raises(CheckpointError, match="no optimizer"):
        read_adapter(tmp_path / "b", with_optimizer=True, device=CPU)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_torn_checkpoint_is_recognised(adapter: Adapter, tmp_path: Path, file: str, damage: str) -> None:
    write_adapter(tmp_path / "a", adapter.weights, adapter.moments, META, overwrite=False)
    path = tmp_path / "a" / file
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        path.write_bytes(data[:1] + bytes([data[1] ^ 255]) + data[2:])
    else:
        path.unlink()
    with pytest.raises(TornCheckpoint, match=str(tmp_path)):
        read_adapter(tmp_path / "a", with_optimizer=True, device=CPU)


@pytest.mark.parametrize("unembed", [True, False])
def test_peft_reads_our_adapter_and_gives_our_logits(engine: Engine, tmp_path: Path, unembed: bool) -> None:
    adapter = tiny.trained_adapter(engine, rank=6, alpha=24.0, train_unembed=unembed)
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    theirs = PeftModel.from_pretrained(tiny.llama(), str(tmp_path / "a")).eval()
    tokens = tiny.tokens(20, 0)
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(tokens)], CrossEntropy()))
    with torch.no_grad():
        logits_TV = theirs(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert output.loss_fn_outputs[0]["logprobs"].array == pytest.approx(expected.numpy(), abs=1e-5)


def test_an_alpha_of_its_own_is_kept(engine: Engine, tmp_path: Path) -> None:
    adapter = tiny.run(engine, ops.CreateAdapter(LoraConfig(rank=4, alpha=8.0, seed=0)))
    assert adapter.weights.scale == 2.0
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    assert read_adapter(tmp_path / "a", with_optimizer=False, device=CPU).weights.scale == 2.0
