"""Merged models: the numbers of base and adapter together, in files that transformers loads."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import tiny
from stovetop.backends.local import export_merged
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.files.adapter_files import write_adapter
from stovetop.engine.files.merge import write_merged
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.loading import fingerprint, load_model
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig

TOKENS = tiny.tokens(20, 0)


def base_folder(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, shards: bool = False) -> Path:
    model = tiny.llama(tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    tiny.tokenizer().save_pretrained(folder)
    return folder


def adapter_on(base: Path, **lora: bool) -> tuple[AdapterWeights, list[float]]:
    """An adapter that changes the model, and the logprobs that our engine gives with it."""
    engine = Engine(load_model(base, "base", dtype="float32"))
    adapter = tiny.trained_adapter(engine, rank=6, alpha=24.0, **lora)
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(TOKENS)], CrossEntropy()))
    return adapter.weights, output.loss_fn_outputs[0]["logprobs"].data


@torch.no_grad()
def merged_logprobs(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits_TV = model(torch.tensor([TOKENS[:-1]]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    ("tied", "shards", "train_unembed"),
    [
        pytest.param(*three, marks=[] if sum(three) in (0, 3) else [pytest.mark.slow])
        for three in itertools.product([False, True], repeat=3)
    ],
)
def test_transformers_gives_the_merged_model_our_logprobs(
    tmp_path: Path, tied: bool, shards: bool, train_unembed: bool
) -> None:
    base = base_folder(tmp_path / "base", tied=tied, shards=shards)
    weights, expected = adapter_on(base, train_unembed=train_unembed)
    report = write_merged(base, weights, tmp_path / "merged")
    assert merged_logprobs(tmp_path / "merged") == pytest.approx(expected, abs=1e-5)
    assert (len(list(report.folder.glob("*.safetensors"))) > 1) == shards
    assert report.num_merged == 14 + train_unembed
    assert report.dtype == "float32"
    assert 0 < report.lost_share < 1e-5
    assert (report.untied_bytes > 0) == (tied and train_unembed)
    config = json.loads((report.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] == (tied and not train_unembed)
    assert AutoTokenizer.from_pretrained(report.folder).decode([72, 105]) != ""


def test_a_merged_model_is_a_base_model_of_its_own(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", tied=True)
    weights, expected = adapter_on(base)
    write_merged(base, weights, tmp_path / "merged")
    assert fingerprint(tmp_path / "merged") != fingerprint(base)
    engine = Engine(load_model(tmp_path / "merged", "merged"))
    adapter = tiny.create(engine, LoraConfig(rank=1))  # B is zero: the merged model itself
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(TOKENS)], CrossEntropy()))
    assert output.loss_fn_outputs[0]["logprobs"].data == pytest.approx(expected, abs=1e-5)


def test_what_rounding_costs_is_measured(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    weights, _ = adapter_on(base, train_unembed=False)
    report = write_merged(base, weights, tmp_path / "merged")
    assert report.dtype == "bfloat16"
    name = "model.layers.0.self_attn.q_proj"
    with (
        safe_open(base / "model.safetensors", "pt") as before,
        safe_open(report.folder / "model.safetensors", "pt") as now,
    ):
        delta = weights.scale * weights.tensors[f"{name}.B"] @ weights.tensors[f"{name}.A"]
        error = now.get_tensor(f"{name}.weight").float() - (before.get_tensor(f"{name}.weight").float() + delta)
    assert 0 < error.abs().max() <= report.max_error
    assert report.lost_share == pytest.approx((error.norm() / delta.norm()).item(), rel=0.5)
    exact = write_merged(base, weights, tmp_path / "exact", dtype="float32")
    assert exact.dtype == "float32"
    assert 0 < exact.lost_share < report.lost_share / 1000
    assert json.loads((exact.folder / "config.json").read_text())["dtype"] == "float32"


def test_what_cannot_be_merged_is_named_before_anything_is_written(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    strange = AdapterWeights(LoraConfig(rank=1), {"h.0.c_attn.A": torch.ones(1, 64), "h.0.c_attn.B": torch.ones(64, 1)})
    with pytest.raises(CheckpointError, match=r"h\.0\.c_attn\.weight"):
        write_merged(base, strange, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_files_that_transformers_does_not_read_are_no_part_of_the_merged_model(tmp_path: Path) -> None:
    """As published folders have them: the same weights under other names, or what is left of an earlier cut."""
    base = base_folder(tmp_path / "base", shards=True)
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, base / "consolidated.safetensors")
    weights, expected = adapter_on(base)
    report = write_merged(base, weights, tmp_path / "merged")
    assert not (report.folder / "consolidated.safetensors").exists()
    assert merged_logprobs(report.folder) == pytest.approx(expected, abs=1e-5)
    load_model(report.folder, "merged", deterministic=False)


def test_a_trained_head_is_never_merged_into_the_embedding(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", tied=True)
    stored = load_file(base / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    save_file({**stored, "lm_head.weight": embedding.clone()}, base / "model.safetensors", {"format": "pt"})
    weights, expected = adapter_on(base)
    report = write_merged(base, weights, tmp_path / "merged")
    assert json.loads((report.folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert merged_logprobs(report.folder) == pytest.approx(expected, abs=1e-5)
    only_head = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in stored.items()}
    save_file(only_head, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="stores its head in place of the embedding"):
        write_merged(base, weights, tmp_path / "another")


def test_nothing_is_overwritten_and_no_dtype_invented(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    weights, _ = adapter_on(base)
    with pytest.raises(InvalidRequest, match="something at this path"):
        write_merged(base, weights, base)
    with pytest.raises(InvalidRequest, match="'int8'"):
        write_merged(base, weights, tmp_path / "merged", dtype="int8")


def test_a_checkpoint_is_merged_into_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", tied=True)
    weights, expected = adapter_on(base)
    meta = {"base_model": str(base), "fingerprint": fingerprint(base)}
    write_adapter(tmp_path / "state", weights, None, meta, overwrite=False)
    export_merged(str(tmp_path / "state"), str(tmp_path / "merged"))
    assert merged_logprobs(tmp_path / "merged") == pytest.approx(expected, abs=1e-5)
    other = tiny.save_model(tmp_path / "other", tiny.llama(seed=1))
    with pytest.raises(CheckpointError, match="was trained on"):
        export_merged(str(tmp_path / "state"), str(tmp_path / "more"), base_model=str(other))
