"""Loading base models: exact ones run, others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from engine import tiny
from engine.model.test_attention import SMALL
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.loading import fingerprint, load_model
from stovetop.engine.ops import ForwardBackward
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.tokenizer import get_tokenizer
from stovetop.types import LoraConfig
from test_fetch import TOKENS, write_gguf


def mixture(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes, **changes))


def test_a_folder_loads_with_its_limits_and_tokenizer(tmp_path: Path) -> None:
    base = load_model(tiny.save_model(tmp_path), "mine")
    assert (base.limits.name, base.limits.vocab_size, base.limits.context_length) == ("mine", 512, 256)
    assert base.stop_tokens == {257}
    assert base.tokenizer is not None
    assert base.tokenizer.decode([72, 105]) != ""


def test_base_weights_take_no_gradient() -> None:
    assert not any(parameter.requires_grad for parameter in tiny.base_model().trunk.parameters())


def test_layers_that_are_no_attention_are_refused_by_name() -> None:
    config = Qwen3NextConfig(**SMALL | {"num_hidden_layers": 4}, num_experts=2, num_experts_per_tok=1)
    with pytest.raises(InvalidRequest, match=r"'next'.*linear_attention"):
        adopt(Qwen3NextForCausalLM(config), "next", fingerprint="")
    mamba = FalconMambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(InvalidRequest, match="'mamba'"):
        adopt(FalconMambaForCausalLM(mamba), "mamba", fingerprint="")


def test_a_head_that_we_do_not_honour_is_refused_by_name() -> None:
    class Squared(LlamaForCausalLM):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            output = super().forward(*arguments, **named)
            output.logits = output.logits**2
            return output

    with pytest.raises(InvalidRequest, match=r"'squared'.*differ from the library"):
        adopt(Squared(tiny.llama().config), "squared", fingerprint="")


def test_soft_capped_scores_are_honoured() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SMALL, final_logit_softcapping=None, attn_logit_softcapping=2.0, query_pre_attn_scalar=16, sliding_window=4
    )
    adopt(Gemma2ForCausalLM(config), "gemma", fingerprint="")


def test_experts_train_nothing_rather_than_something_else() -> None:
    engine = Engine(adopt(mixture(), "experts", fingerprint=""))
    with pytest.raises(InvalidRequest, match=r"train_mlp=True.*experts"):
        tiny.create(engine, LoraConfig(rank=2, seed=0))
    adapter = tiny.create(engine, LoraConfig(rank=2, seed=0, train_mlp=False))
    assert any("q_proj" in name for name in adapter.weights.tensors)


def test_models_differ_by_content_not_by_place(tmp_path: Path) -> None:
    one = fingerprint(tiny.save_model(tmp_path / "one"))
    same = fingerprint(tiny.save_model(tmp_path / "same"))
    other = fingerprint(tiny.save_model(tmp_path / "other", tiny.llama(seed=1)))
    assert one == same != other


def test_a_model_that_was_trained_in_one_layer_only_is_another(tmp_path: Path) -> None:
    model = tiny.llama()
    before = fingerprint(tiny.save_model(tmp_path / "before", model))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1e-3
    assert fingerprint(tiny.save_model(tmp_path / "after", model)) != before


def test_a_gguf_file_is_a_base_model_with_its_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    base = load_model(tmp_path / "model.gguf", "in gguf")
    assert (base.limits.vocab_size, base.limits.context_length, base.stop_tokens) == (len(TOKENS), 64, {2})
    assert base.tokenizer is not None
    assert base.tokenizer.decode([TOKENS.index("ab")]) == "ab"
    engine = Engine(base)
    adapter = tiny.create(engine, LoraConfig(rank=2, seed=0))
    output = tiny.run(engine, ForwardBackward(adapter, [tiny.datum([5, 9, 20, 7])], CrossEntropy()))
    assert output.metrics["loss:sum"] > 0
    assert get_tokenizer(str(tmp_path / "model.gguf")).eos_token_id == 2


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'int3'"):
        load_model(tiny.save_model(tmp_path), "mine", dtype="int3")


def test_several_ends_of_text_all_stop(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_model(folder, "mine").stop_tokens == {3, 4, 257}
