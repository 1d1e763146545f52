"""The table of `model_kinds.py`: classes of transformers in tiny configurations; which are refused, and why."""

from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

VOCABULARY, CONTEXT, LONG = 256, 128, 90

# what of these a config knows it gets
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
WINDOW = {"sliding_window": 12}
LATENT = {  # queries and keys have another head size than values
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "head_dim": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Kind:
    """A configuration of one class of the library."""

    model_type: str
    note: str = ""  # what is special about it
    changes: dict[str, Any] = field(default_factory=dict)
    refused: str = ""  # what the refusal says; empty for a kind that runs
    because: str = ""  # in the page's words

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.note}".strip()

    @property
    def class_name(self) -> str:
        return CLASSES[self.model_type]


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def words(text: str) -> list[str]:
    return text.split()


OWN_ATTENTION = "its attention is written out in the model and cannot be exchanged"
RECURRENT = "some of its layers are recurrent, convolutional or linear attention"
OTHER_KINDS = "neither full nor sliding attention"
NO_LIMIT = "no max_position_embeddings"
FEW_ATTEND = "attend through our function"
DIFFERS = "differ from the library's"

PLAIN = words(
    "afmoe apertus arcee aria_text bitnet biogpt cohere cohere2 cohere2_moe ctrl cwm ernie4_5 ernie4_5_moe exaone "
    "exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox "
    "gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama mellum mimo_v2_flash minimax_m2 ministral ministral3 "
    "mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma"
)

RIGHT = [
    *(Kind(model_type) for model_type in PLAIN),
    *(
        Kind(model_type, "with a short window", WINDOW)
        for model_type in words(
            "afmoe cohere2 cohere2_moe cwm exaone4 exaone_moe flint gemma2 gemma3_text gpt_oss granite_swa "
            "granitemoe_swa kolibri1 laguna mellum mimo_v2_flash ministral ministral3 mistral mixtral olmo3 phi3 "
            "starcoder2 vaultgemma"
        )
    ),
    *(
        Kind(model_type, "with a short window", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2})
        for model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3")
    ),
    Kind("gemma2", "with soft caps", {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    Kind("llama", "with linear rope", rope(rope_type="linear", factor=4.0)),
    Kind("llama", "with dynamic rope", rope(rope_type="dynamic", factor=4.0)),
    Kind("llama", "with yarn", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    Kind(
        "llama",
        "with the rope of Llama 3",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    Kind("phi3", "with longrope", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    Kind("llama", "with longrope", {"rope_parameters": LONGROPE}),
    Kind("llama", "with one key head", {"num_key_value_heads": 1}),
    Kind("llama", "with its head tied", {"tie_word_embeddings": True}),
    Kind(
        "ministral3",
        "with scaled queries",
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            llama_4_scaling_beta=0.5,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
            type="yarn",
        ),
    ),
    Kind(
        "phi",
        "with half its heads rotated",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    Kind("stablelm", "with normed heads", {"use_qkv_bias": True, "qk_layernorm": True}),
    Kind("gpt_neox", "in sequence", {"use_parallel_residual": False}),
    Kind("gptj", "", {"rotary_dim": 8}),
    Kind("codegen", "", {"rotary_dim": 8}),
    Kind("cohere", "with scaled logits", {"logit_scale": 0.25}),
    Kind(
        "granite", "with multipliers", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}
    ),
    Kind("deepseek_v2", "", LATENT | {"first_k_dense_replace": 1, "topk_method": "greedy"}),
    Kind("deepseek_v3", "", LATENT | {"n_routed_experts": 8, "n_group": 2, "first_k_dense_replace": 1}),
    Kind("glm4_moe_lite", "", LATENT),
    Kind("minicpm3", "", LATENT),
    Kind("youtu", "", LATENT),
    Kind("dots1", "", {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    Kind("qwen3_moe", "with dense layers between", {"decoder_sparse_step": 2}),
    Kind("mixtral", "with one expert a token", {"num_experts_per_tok": 1}),
    Kind(
        "gemma3",
        "(multimodal, text only)",
        {
            "text_config": {
                **{key: value for key, value in SIZES.items() if "exp" not in key and "group" not in key},
                **WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
            "boi_token_index": VOCABULARY - 2,
            "eoi_token_index": VOCABULARY - 3,
        },
    ),
]

IN_THE_MASK = "its window is in a mask of the library only; without the window it runs"
REFUSED = [
    Kind("phimoe", "with a short window", WINDOW, "do not pass on sliding_window", IN_THE_MASK),
    Kind(
        "qwen2_moe",
        "with a short window",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        "do not pass on sliding_window",
        IN_THE_MASK,
    ),
    Kind("diffllama", "", {}, "attention runs 8 times in its 4 layers", "it attends twice in a layer"),
    Kind("doge", "", {}, DIFFERS, "its attention hides tokens by what they hold"),
    *(Kind(kind, "", {}, FEW_ATTEND, OWN_ATTENTION) for kind in ("falcon", "gpt_neox_japanese", "openai-gpt", "xlm")),
    Kind("gpt_neo", "", {"attention_types": [[["global", "local"], 2]], "window_size": 12}, FEW_ATTEND, OWN_ATTENTION),
    *(
        Kind(kind, "", {}, NO_LIMIT, "positions come from biases of attention (ALiBi) or a state")
        for kind in ("bloom", "mpt")
    ),
    *(
        Kind(kind, "", {}, OTHER_KINDS, RECURRENT)
        for kind in words(
            "bamba falcon_h1 falcon_mamba jamba kimi_linear mamba minimax nemotron_h olmo_hybrid qwen3_5_text "
            "qwen3_next recurrent_gemma"
        )
    ),
    Kind("rwkv", "", {}, FEW_ATTEND, RECURRENT),
    Kind("lfm2", "", {"layer_types": ["conv", "full_attention"] * 2}, OTHER_KINDS, RECURRENT),
    Kind("llama4_text", "", {}, "chunked_attention", "its layers attend within chunks"),
    Kind("bert-generation", "", {}, DIFFERS, "its attention sees later tokens"),
    Kind("modernbert-decoder", "", {}, DIFFERS, "its head is more than one linear"),
]
KINDS = [*RIGHT, *REFUSED]
