import fnmatch
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stovetop import hyperparams
from stovetop.errors import InvalidRequest, UnknownName

GOLDEN_LR = {  # LoRA; full fine-tuning is a tenth
    "meta-llama/Llama-3.2-1B": 0.0004908239409722158,
    "meta-llama/Llama-3.2-3B": 0.00035760078614950245,
    "meta-llama/Llama-3.1-8B": 0.0002856415043086949,
    "meta-llama/Llama-3.1-70B": 0.0001662328630957161,
    "Qwen/Qwen3-4B": 0.0004905250962784578,
    "Qwen/Qwen3-8B": 0.00047297908091376354,
    "moonshotai/Kimi-K2-Thinking": 0.0004529043419680364,
}

SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (4, 4),
    "model.layers.0.mlp.gate.weight": (2, 4),
    "model.norm.weight": (4,),
    **{
        f"model.layers.0.mlp.experts.{expert}.{matrix}.weight": shape
        for expert in (0, 1)
        for matrix, shape in {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}.items()
    },
}


def model_folder(
    folder: Path, *shards: Mapping[str, tuple[int, ...]], config: Mapping[str, object] | None = None
) -> str:
    """A model whose weight files end where the tensors would begin: reading one would fail."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {}))
    for number, shapes in enumerate(shards):
        tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        (folder / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(folder)


@pytest.fixture
def experts(tmp_path: Path) -> str:
    items = list(SHAPES.items())
    return model_folder(tmp_path / "experts", dict(items[:5]), dict(items[5:]))


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B", "nvidia/Llama-3.3-Nemotron-Super-49B"])
def test_a_family_that_nobody_has_published_a_rate_for_asks_for_one(model: str) -> None:
    with pytest.raises(InvalidRequest, match=f"no published learning-rate formula.*give a learning_rate.*{model}"):
        hyperparams.get_lr(model)


@pytest.mark.parametrize("model", GOLDEN_LR)
def test_get_lr_equals_the_published_rates(model: str):
    assert hyperparams.get_lr(model) == pytest.approx(GOLDEN_LR[model], rel=1e-12)
    assert hyperparams.get_lr(model, is_lora=False) == pytest.approx(GOLDEN_LR[model] / 10, rel=1e-12)


@pytest.mark.parametrize("suffix", ["-Instruct", "-Base", "-Instruct-2507", "-Thinking-2507"])
def test_a_variant_of_a_known_model_has_its_rate(suffix: str):
    assert hyperparams.get_lr("Qwen/Qwen3-4B" + suffix) == hyperparams.get_lr("Qwen/Qwen3-4B")


def test_a_model_outside_the_table_is_measured_by_its_config(tmp_path: Path):
    folder = model_folder(tmp_path / "my-llama", config={"hidden_size": 4096})
    assert hyperparams.get_lr(folder) == hyperparams.get_lr("meta-llama/Llama-3.1-8B")


def test_a_model_that_sees_keeps_its_width_with_its_text_config(tmp_path: Path):
    assert hyperparams.get_hidden_size(model_folder(tmp_path / "vl", config={"text_config": {"hidden_size": 96}})) == 96


@pytest.mark.parametrize("model", ["foo/bar", "llama-experiments/gpt2"])
def test_a_family_without_a_formula_is_refused_by_name(model: str):
    with pytest.raises(InvalidRequest, match=f"give a learning_rate.*{model}"):
        hyperparams.get_lr(model)


def test_a_known_family_of_unknown_width_is_refused(tmp_path: Path):
    with pytest.raises(UnknownName, match="Qwen3-9000B"):
        hyperparams.get_lr("Qwen/Qwen3-9000B")
    with pytest.raises(InvalidRequest, match="no hidden_size"):
        hyperparams.get_lr(model_folder(tmp_path / "llama"))


def test_lora_takes_ten_times_the_rate():
    assert hyperparams.get_lora_lr_over_full_finetune_lr("any/model") == 10.0
    with pytest.raises(InvalidRequest, match=r"lora_alpha=32 only.*: 64"):
        hyperparams.get_lora_lr_over_full_finetune_lr("any/model", lora_alpha=64)


@pytest.mark.parametrize(
    ("include_experts", "shared", "count"), [(True, True, 136), (True, False, 160), (False, True, 40)]
)
def test_lora_parameters_are_counted_from_headers_alone(experts: str, include_experts: bool, shared: bool, count: int):
    arguments = (experts, 2, include_experts, shared)
    assert hyperparams.get_lora_param_count(*arguments) == count
    assert sum(hyperparams.get_lora_param_breakdown(*arguments).values()) == count


@dataclass
class FakeFiles:
    """Files elsewhere, each with tensors behind its header; it keeps what was read of them."""

    contents: dict[str, bytes]
    was_read: dict[str, int] = field(default_factory=dict[str, int])

    def glob(self, path: str) -> list[str]:
        return fnmatch.filter(self.contents, path)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.was_read[path] = self.was_read.get(path, 0) + end - start
        return self.contents[path][start:end]


def test_of_a_model_elsewhere_only_the_headers_of_its_shards_are_read(experts: str):
    headers = {f"org/model/{file.name}": file.read_bytes() for file in Path(experts).glob("*.safetensors")}
    files = FakeFiles({path: header + bytes(10_000) for path, header in headers.items()} | {"org/other/x": b""})
    assert hyperparams.get_lora_param_count("org/model", 2, files=files) == 136
    assert files.was_read == {path: len(header) for path, header in headers.items()}
    assert hyperparams.get_full_finetune_param_count("org/model", files) == sum(map(math.prod, SHAPES.values()))
    with pytest.raises(InvalidRequest, match=r"no \*\.safetensors file.*: org/other"):
        hyperparams.get_full_finetune_param_count("org/other", files)


def test_experts_share_the_factor_on_the_side_of_the_residual_stream(experts: str):
    counts = hyperparams.get_lora_param_breakdown(experts, 2)
    layer = "model.layers.0.mlp.experts"
    assert [counts[f"{layer}.0.{matrix}.weight"] for matrix in ("gate_proj", "down_proj")] == [2 * 10, 2 * 10]
    assert [counts[f"{layer}.1.{matrix}.weight"] for matrix in ("gate_proj", "down_proj")] == [2 * 6, 2 * 6]


@pytest.mark.parametrize("name", ["q_b_proj", "kv_b_proj"])
def test_the_second_half_of_a_projection_that_is_low_rank_already_gets_no_factors(tmp_path: Path, name: str):
    """Those of multi-head latent attention: its first halves, q_a_proj and kv_a_proj_with_mqa, get them."""
    layer = "model.layers.0.self_attn"
    first = {"q_b_proj": "q_a_proj", "kv_b_proj": "kv_a_proj_with_mqa"}[name]
    folder = model_folder(tmp_path / "mla", {f"{layer}.{first}.weight": (3, 8), f"{layer}.{name}.weight": (16, 3)})
    assert hyperparams.get_lora_param_breakdown(folder, 2) == {f"{layer}.{first}.weight": 2 * (3 + 8)}


def test_all_parameters_are_counted_for_full_fine_tuning(experts: str):
    num_params = sum(math.prod(shape) for shape in SHAPES.values())
    assert hyperparams.get_full_finetune_param_count(experts) == num_params
    assert hyperparams.get_full_finetune_lr_multiplier(experts) == pytest.approx(num_params**-0.5)
    assert hyperparams.get_lora_lr_multiplier(experts) == pytest.approx(10 * num_params**-0.5)


def test_fused_experts_are_not_silently_left_out(tmp_path: Path):
    folder = model_folder(tmp_path / "fused", {"layers.0.experts.gate_up_proj": (8, 4, 12)})
    with pytest.raises(InvalidRequest, match="fused"):
        hyperparams.get_lora_param_count(folder)
    assert hyperparams.get_lora_param_count(folder, include_experts=False) == 0


def test_counting_needs_the_files_of_the_model(tmp_path: Path):
    with pytest.raises(UnknownName, match="on this machine"):
        hyperparams.get_lora_param_count("Qwen/Qwen3-8B")
    with pytest.raises(InvalidRequest, match=r"no \*.safetensors"):
        hyperparams.get_full_finetune_param_count(model_folder(tmp_path / "empty"))
    folder = model_folder(tmp_path / "odd")
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(InvalidRequest, match="not a safetensors file"):
        hyperparams.get_full_finetune_param_count(folder)


def test_a_rate_is_given_or_derived_and_what_is_derived_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert hyperparams.settled_rate(3e-4, "any model") == 3e-4
    assert not caplog.records
    with caplog.at_level("INFO", logger="stovetop"):
        assert hyperparams.settled_rate("auto", "meta-llama/Llama-3.1-8B") == hyperparams.get_lr(
            "meta-llama/Llama-3.1-8B"
        )
    assert "learning_rate=auto is 0.0002856 for meta-llama/Llama-3.1-8B" in caplog.text
    with pytest.raises(InvalidRequest, match="give a learning_rate"):
        hyperparams.settled_rate("auto", "smollm2")
