"""Tiny random models of each family against the library's own logits: packed, with shared prefixes, and decoded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from engine import tiny
from engine.model.test_attention import PROMPT, SEQUENCES, SMALL, packed_logits
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.ops import ComputeLogprobs, ForwardBackward, Sample
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig, ModelInput, SamplingParams

ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def gpt_oss(**changes: Any) -> PreTrainedModel:
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**changes, num_local_experts=4, num_experts_per_tok=2))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    """Latent attention: queries and keys have another head size than values. The first layer is dense."""
    del changes["head_dim"]
    heads = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16}
    sizes = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**changes | heads | sizes | experts | EXPERTS))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **sizes: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)),
    "qwen2": lambda **sizes: tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes, tie_word_embeddings=True)),
    "qwen3": lambda **sizes: tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes)),
    "qwen3-moe": lambda **sizes: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes, **EXPERTS, num_experts=4)),
    "mistral": lambda **sizes: tf.MistralForCausalLM(tf.MistralConfig(**sizes, sliding_window=5)),
    "gemma2": lambda **sizes: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **sizes,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=16,
        )
    ),
    "gemma3": lambda **sizes: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**sizes, sliding_window=5, layer_types=ALTERNATING, query_pre_attn_scalar=16)
    ),
    "gpt-oss": lambda **sizes: gpt_oss(**sizes, sliding_window=5, layer_types=ALTERNATING),
    "deepseek-v3": deepseek_v3,
    "cohere": lambda **sizes: tf.CohereForCausalLM(tf.CohereConfig(**sizes, logit_scale=0.25)),
    "granite": lambda **sizes: tf.GraniteForCausalLM(
        tf.GraniteConfig(**sizes, logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0)
    ),
}
WITH_EXPERTS = {"qwen3-moe", "gpt-oss", "deepseek-v3"}


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family](**SMALL).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(family: str) -> BaseModel:
    return adopt(made(family), family, fingerprint=family)


@torch.no_grad()
def test_each_family_packed_and_with_shared_prefixes_has_the_librarys_logits(family: str, base: BaseModel) -> None:
    library = made(family)
    expected = [library(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in SEQUENCES]
    for share in (True, False):
        for logits_TV, expected_TV in zip(packed_logits(base, SEQUENCES, share), expected, strict=True):
            torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt", [PROMPT, tiny.tokens(70, 0)], ids=["short", "long"])  # of the long one they share
def test_each_family_decodes_what_a_whole_forward_scores(base: BaseModel, prompt: list[int]) -> None:
    engine = Engine(base)
    params = SamplingParams(max_tokens=12, seed=5, stop=[])
    response = tiny.run(engine, Sample(None, ModelInput.from_ints(prompt), 2, params, False, 0))
    for sequence in response.sequences:
        whole = ModelInput.from_ints([*prompt, *sequence.tokens])
        scored = tiny.run(engine, ComputeLogprobs(None, whole))[len(prompt) :]
        assert sequence.logprobs == pytest.approx(scored, abs=1e-4)


def test_each_family_trains_or_says_why_a_part_does_not(family: str, base: BaseModel) -> None:
    engine = Engine(base)
    if family in WITH_EXPERTS:
        with pytest.raises(InvalidRequest, match=r"train_mlp=True.*experts"):
            tiny.create(engine, LoraConfig(rank=2, seed=0))
    config = LoraConfig(rank=2, seed=0, train_mlp=family not in WITH_EXPERTS)
    adapter = tiny.create(engine, config)
    tiny.run(engine, ForwardBackward(adapter, [tiny.datum(sequence) for sequence in SEQUENCES], CrossEntropy()))
    reached = {name for name, gradient in adapter.gradients.items() if gradient.abs().max() > 0}
    assert reached == {name for name in adapter.weights.tensors if name.endswith(".B")}
