"""Adapters on disk: exact, readable by PEFT, torn ones recognised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from engine import tiny
from stovetop.durable import MANIFEST, write_folder
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.files import adapter_files
from stovetop.engine.files.adapter_files import read_adapter, write_adapter
from stovetop.engine.lora.weights import AdapterWeights, Moments
from stovetop.engine.model.adopting import adopt
from stovetop.engine.training.adapter import Adapter
from stovetop.errors import CheckpointError, TornCheckpoint
from stovetop.losses import CrossEntropy
from stovetop.saved_states import CONFIG, MARK, OPTIMIZER, TENSORS, describe
from stovetop.target_names import PREFIX
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


def test_equal_adapters_are_equal_files(adapter: Adapter, tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(8)]
    for folder in folders:
        write_adapter(folder, adapter.weights, adapter.moments, META, overwrite=False)
    for name in (TENSORS, OPTIMIZER, MANIFEST):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1


def test_a_tensor_file_is_the_librarys_but_for_the_order_of_its_header(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "PIECE_BYTES", 3000)
    write_adapter(tmp_path / "a", adapter.weights, adapter.moments, META, overwrite=False)
    for name in (TENSORS, OPTIMIZER):
        ours = (tmp_path / "a" / name).read_bytes()
        theirs = save(load(ours), MARK)
        assert ours[:8] == theirs[:8]
        end = 8 + int.from_bytes(ours[:8], "little")
        assert ours[end:] == theirs[end:]
        assert json.loads(ours[8:end]) == json.loads(theirs[8:end])


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


def test_a_snapshot_that_is_written_late_has_the_bytes_of_when_it_was_taken(
    engine: Engine, adapter: Any, tmp_path: Path
) -> None:
    """A step and a move of the tensors come between."""
    write_adapter(tmp_path / "now", adapter.weights, adapter.moments, META, overwrite=False)
    ticket = engine.submit(ops.SaveAdapter(adapter, tmp_path / "later", META, with_optimizer=True, overwrite=False))
    (saved,) = engine.step()
    assert (saved.ticket, saved.error) == (ticket, None)
    later = saved.result
    moved = adapter.weights.tensors
    tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 5))], CrossEntropy()))
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    assert adapter.weights.tensors is not moved
    moved.update({name: torch.zeros_like(tensor) for name, tensor in moved.items()})
    assert isinstance(later, ops.Snapshot)
    later.write()
    for name in (TENSORS, OPTIMIZER, MANIFEST):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "now" / name).read_bytes()


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


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("file", [TENSORS, CONFIG])
def test_a_folder_of_ours_that_lost_its_manifest_is_torn_and_not_a_peft_adapter(
    adapter: Adapter, tmp_path: Path, with_optimizer: bool, file: str
) -> None:
    moments = adapter.moments if with_optimizer else None
    write_adapter(tmp_path / "a", adapter.weights, moments, META, overwrite=False)
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(TornCheckpoint, match="manifest"):
        describe(tmp_path / "a")
    data = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes(data[:-100] + bytes(100))
    with pytest.raises(TornCheckpoint):
        describe(tmp_path / "a")
    (tmp_path / "a" / file).unlink()
    with pytest.raises(TornCheckpoint):
        describe(tmp_path / "a")


@pytest.mark.parametrize("content", ["[]", "7", '{"files": {}}', "[" * 100_000])
def test_a_manifest_that_was_not_written_here_is_torn(adapter: Adapter, tmp_path: Path, content: str) -> None:
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    (tmp_path / "a" / "manifest.json").write_text(content)
    with pytest.raises(TornCheckpoint, match="manifest"):
        describe(tmp_path / "a")


def test_a_folder_of_something_else_is_no_saved_adapter(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", {"config.json": b"{}"}, {"kind": "a fetched model"})
    with pytest.raises(CheckpointError, match="holds no saved adapter"):
        describe(tmp_path / "model")


def test_an_adapter_or_optimizer_of_ours_that_is_not_finite_is_refused_when_it_is_read(
    adapter: Adapter, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.B"
    bad = adapter.weights.tensors[name].clone()
    bad[3, 0] = float("nan")
    tensors = {**adapter.weights.tensors, name: bad}
    write_adapter(tmp_path / "a", AdapterWeights(adapter.weights.config, tensors), None, META, overwrite=False)
    with pytest.raises(CheckpointError, match=r"NaN or infinity in model\.layers\.0\.mlp\.up_proj\.B"):
        read_adapter(tmp_path / "a", with_optimizer=False, device=CPU)
    moments = Moments(1, adapter.moments.mean, {**adapter.moments.square, name: bad})
    write_adapter(tmp_path / "b", adapter.weights, moments, META, overwrite=False)
    with pytest.raises(CheckpointError, match=r"optimizer.*square\.model\.layers\.0\.mlp\.up_proj\.B"):
        read_adapter(tmp_path / "b", with_optimizer=True, device=CPU)


def multimodal() -> Gemma3ForConditionalGeneration:
    """A tiny Gemma 3 whose vision tower has linears of the same names as its text model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 512, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
    text |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2}
    config = Gemma3Config(
        text_config=text,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    config._attn_implementation = "eager"
    return Gemma3ForConditionalGeneration(config)


def test_of_a_multimodal_model_the_text_layers_are_trained_and_nothing_else_by_us_and_by_peft(tmp_path: Path) -> None:
    engine = Engine(adopt(multimodal(), "gemma", fingerprint="gemma"))
    adapter = tiny.trained_adapter(engine, rank=2)
    assert all(name.startswith(("model.language_model.layers.", "lm_head.")) for name in adapter.weights.tensors)
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    theirs = PeftModel.from_pretrained(multimodal(), str(tmp_path / "a")).eval()
    adapted = {
        name.removeprefix(PREFIX).partition(".lora_")[0] for name, _ in theirs.named_modules() if ".lora_A." in name
    }
    assert adapted == {name.rpartition(".")[0] for name in adapter.weights.tensors}
    tokens = tiny.tokens(20, 0)
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(tokens)], CrossEntropy()))
    assert output.loss_fn_outputs[0]["logprobs"].array == pytest.approx(peft_logprobs(theirs, tokens), abs=1e-5)


@torch.no_grad()
def peft_logprobs(model: PeftModel, tokens: list[int]) -> list[float]:
    logits_TV = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("unembed", [True, False])
def test_peft_reads_our_adapter_and_gives_our_logits(engine: Engine, tmp_path: Path, unembed: bool) -> None:
    adapter = tiny.trained_adapter(engine, rank=6, alpha=24.0, train_unembed=unembed)
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    theirs = PeftModel.from_pretrained(tiny.llama(), str(tmp_path / "a")).eval()
    tokens = tiny.tokens(20, 0)
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(tokens)], CrossEntropy()))
    assert output.loss_fn_outputs[0]["logprobs"].array == pytest.approx(peft_logprobs(theirs, tokens), abs=1e-5)


def test_an_alpha_of_its_own_is_kept(engine: Engine, tmp_path: Path) -> None:
    adapter = tiny.create(engine, LoraConfig(rank=4, alpha=8.0, seed=0))
    assert adapter.weights.scale == 2.0
    write_adapter(tmp_path / "a", adapter.weights, None, META, overwrite=False)
    assert read_adapter(tmp_path / "a", with_optimizer=False, device=CPU).weights.scale == 2.0


def test_a_resumed_run_reports_the_same_numbers_to_the_last_bit(engine: Engine, tmp_path: Path) -> None:
    """Norms too, which are sums over all tensors, and by which clipping scales the gradient."""
    clipped = replace(tiny.SGD, grad_clip_norm=0.05)

    def steps(adapter: Adapter, first: int) -> list[dict[str, float]]:
        metrics = []
        for seed in range(first, first + 5):
            data = [tiny.datum(tiny.tokens(9, seed)), tiny.datum(tiny.tokens(30, seed))]
            metrics.append(tiny.run(engine, ops.ForwardBackward(adapter, data, CrossEntropy())).metrics)
            metrics.append(tiny.run(engine, ops.OptimStep(adapter, clipped)).metrics)
        return metrics

    went_on = tiny.trained_adapter(engine)
    steps(went_on, 0)
    tiny.run(engine, ops.SaveAdapter(went_on, tmp_path / "a", META, with_optimizer=True, overwrite=False))
    expected = steps(went_on, 5)
    assert all(metrics["grad_norm"] > 0.05 for metrics in expected[1::2])
    resumed = tiny.load(engine, tmp_path / "a", with_optimizer=True)
    assert steps(resumed, 5) == expected
