"""What a model's config asks for is seen on a small copy of it, whatever the model's size: right, or refused."""

import logging
import time
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine import tiny
from engine.model.test_attention import SMALL, packed_logits
from stovetop.engine.kernels.arithmetic import Fast, RowExact
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.cutting import LONGEST, SOFT_CAP, WINDOW, cut_config, kinds_of_layers
from stovetop.errors import InvalidRequest

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 48,
}


def longrope() -> PreTrainedModel:
    torch.manual_seed(0)
    config = tf.Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=48, pad_token_id=0)
    return tf.Phi3ForCausalLM(config).eval()


def test_longrope_has_the_context_up_to_which_nothing_depends_on_the_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        base = adopt(longrope(), "long", fingerprint="")
    assert base.limits.context_length == 48
    assert "the context is 48 tokens, not 128" in caplog.text
    library = longrope()
    sequences = [tiny.tokens(48, 1), tiny.tokens(6, 2), tiny.tokens(30, 3)]
    for sequence, logits_TV in zip(sequences, packed_logits(base, sequences), strict=True):
        with torch.no_grad():
            expected_TV = library(torch.tensor([sequence]), use_cache=False).logits[0]
        torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=1e-4)


class Slowing(torch.nn.Module):
    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary, self.rope_type, self.config = rotary, "slowing", rotary.config

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.rotary(x, position_ids / (1 + position_ids.max() // 32))


class SlowingLlama(LlamaForCausalLM):
    """Its angles depend on the longest position of the pass, from 32 tokens on."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = Slowing(self.model.rotary_emb)


def test_angles_that_depend_on_the_pass_are_seen() -> None:
    with pytest.raises(InvalidRequest, match=r"'slowing'.*sequences of 44, 33, 5 tokens, packed.*differ"):
        adopt(SlowingLlama(tiny.llama().config), "slowing", fingerprint="")


def phimoe(window: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tf.PhimoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=window, pad_token_id=0)
    return tf.PhimoeForCausalLM(config)


def test_a_window_that_is_in_the_librarys_mask_only_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"'phi'.*do not pass on sliding_window.*mask that we do not use"):
        adopt(phimoe(40), "phi", fingerprint="")


def test_a_window_that_no_sequence_exceeds_changes_nothing() -> None:
    adopt(phimoe(SMALL["max_position_embeddings"]), "phi", fingerprint="")


def test_a_models_second_run_of_attention_in_a_layer_is_refused() -> None:
    config = tf.DiffLlamaConfig(**SMALL, pad_token_id=0)
    with pytest.raises(InvalidRequest, match="'twice': attention runs 4 times in its 2 layers"):
        adopt(tf.DiffLlamaForCausalLM(config), "twice", fingerprint="")


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_layers_that_hand_on_no_arguments_run(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(**SMALL, pad_token_id=0)
    adopt(getattr(tf, f"{name}ForCausalLM")(config), name, fingerprint="")


def test_sinks_without_experts_run_on_the_fast_arithmetic() -> None:
    """The row-exact one has no sinks."""
    torch.manual_seed(0)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 0]}
    model = tf.GraniteSWAForCausalLM(tf.GraniteSWAConfig(**SMALL, **layers, sliding_window=5, pad_token_id=0))
    assert isinstance(adopt(model, "sinks", fingerprint="").arithmetic, Fast)
    assert isinstance(adopt(longrope(), "long", fingerprint="").arithmetic, RowExact)


def test_a_routers_near_tie_in_bfloat16_refuses_no_model() -> None:
    torch.manual_seed(0)
    sizes = SMALL | EXPERTS | {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4}
    model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes))  # its largest difference is 0.9 nats
    adopt(model.bfloat16(), "ties", fingerprint="")


def test_weights_in_the_wrong_places_are_seen_among_experts_too() -> None:
    class Shifted(tf.Qwen3MoeForCausalLM):
        """Runs its own way only as it is; ours runs its parts."""

        def forward(self, *arguments: Any, **named: Any) -> Any:
            output = super().forward(*arguments, **named)
            if self.config.num_hidden_layers > 2:  # not in the small copy
                output.logits = output.logits.roll(1, -1)
            return output

    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(**SMALL | {"num_hidden_layers": 4}, num_experts=4, **EXPERTS)
    with pytest.raises(InvalidRequest, match="'shifted': our logits differ"):
        adopt(Shifted(config).bfloat16(), "shifted", fingerprint="")


def test_nan_in_the_weights_is_named() -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(InvalidRequest, match=r"'nan' has NaN .*model\.layers\.1\.mlp\.up_proj\.weight"):
        adopt(model, "nan", fingerprint="")


def test_nan_in_a_buffer_that_is_saved_is_named_too() -> None:
    model = tiny.llama()
    model.model.layers[0].register_buffer("correction", torch.full((2,), float("inf")))
    with pytest.raises(InvalidRequest, match=r"infinity in model\.layers\.0\.correction"):
        adopt(model, "inf", fingerprint="")


def test_packed_numbers_for_weights_are_refused() -> None:
    model = tiny.llama()
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(InvalidRequest, match=r"'packed' is stored quantised .*up_proj"):
        adopt(model, "packed", fingerprint="")


@pytest.mark.parametrize(
    ("config_name", "class_name"),
    [("JetMoeConfig", "JetMoeForCausalLM"), ("GraniteMoeConfig", "GraniteMoeForCausalLM")],
)
def test_routers_are_known_by_what_they_do_and_not_trained(config_name: str, class_name: str) -> None:
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if key != "head_dim"}
    config = getattr(tf, config_name)(**sizes, num_local_experts=4, num_experts_per_tok=2, kv_channels=16)
    base = adopt(getattr(tf, class_name)(config), "experts", fingerprint="")
    assert not [target.name for target in base.targets if "router" in target.name]


# ---- the small copy --------------------------------------------------------------------------------------------------


def on_paper(config: Any, class_name: str) -> PreTrainedModel:
    """A model of full size that takes no memory."""
    with torch.device("meta"):
        return getattr(tf, class_name)(config)


LARGE = {
    "Llama 2 7B": lambda: (tf.LlamaConfig(), "LlamaForCausalLM"),
    "Gemma 3, six kinds in turn": lambda: (tf.Gemma3TextConfig(), "Gemma3ForCausalLM"),
    "gpt-oss 120B": lambda: (tf.GptOssConfig(), "GptOssForCausalLM"),
    "DeepSeek V3, dense layers first": lambda: (tf.DeepseekV3Config(), "DeepseekV3ForCausalLM"),
    "Qwen2, windows in the last layers": lambda: (
        tf.Qwen2Config(num_hidden_layers=30, use_sliding_window=True, sliding_window=4096, max_window_layers=26),
        "Qwen2ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_small_copy_has_two_layers_of_each_kind_and_their_rules(name: str) -> None:
    config, class_name = LARGE[name]()
    large = on_paper(config, class_name)
    started = time.perf_counter()
    small_config = cut_config(large)
    small = on_paper(small_config, class_name)
    assert time.perf_counter() - started < 20  # on a machine that has nothing else to do, below one
    kinds, few = kinds_of_layers(large), kinds_of_layers(small)
    assert [kind.traits for kind in few] == [kind.traits for kind in kinds[: len(few)]]
    for kind in set(kinds):
        assert kinds[: len(few)].count(kind) >= min(2, kinds.count(kind))
    assert sum(parameter.numel() for parameter in small.parameters()) < 12e6
    assert small_config.get_text_config().max_position_embeddings > LONGEST
    windows = {
        layer.self_attn.sliding_window for layer in small.model.layers if hasattr(layer.self_attn, "sliding_window")
    }
    assert windows <= {None, WINDOW}
    head_size = lambda model: getattr(model.model.layers[0].self_attn, "head_dim", None)  # noqa: E731
    assert head_size(small) == head_size(large)


def test_soft_caps_of_the_copy_are_so_low_that_they_show() -> None:
    config = cut_config(on_paper(tf.Gemma2Config(), "Gemma2ForCausalLM"))
    assert config.attn_logit_softcapping == config.final_logit_softcapping == SOFT_CAP


def test_a_model_that_only_looks_like_llama_keeps_the_librarys_layers() -> None:
    """Its parts have the names of Llama's, and compute something else."""

    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    class DoubledLlama(LlamaForCausalLM):
        def __init__(self, config: tf.LlamaConfig) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.input_layernorm.__class__ = Doubled

    assert adopt(tiny.llama(), "plain", fingerprint="").flat is not None
    assert adopt(DoubledLlama(tiny.llama().config), "doubled", fingerprint="").flat is None
