"""Packed and cached attention against the library's own, for every kind of attention that is honoured."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from engine import tiny
from stovetop.engine.engine import Engine
from stovetop.engine.kernels.attention_plans import PackedAttention
from stovetop.engine.kernels.packing import pack
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.ops import ComputeLogprobs, Sample
from stovetop.types import ModelInput, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}


def mistral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5))


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS = {"llama": tiny.llama, "sliding window": mistral, "sinks": gpt_oss}
PROMPT = list(range(100, 112))
SEQUENCES = [tiny.tokens(9, 1), tiny.tokens(7, 2, PROMPT), tiny.tokens(12, 3, PROMPT), tiny.tokens(3, 4)]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, BaseModel]:
    """The library's model as it is, and the same one taken over."""
    make = MODELS[request.param]
    return make().eval(), adopt(make(), request.param, fingerprint=request.param)


def packed_logits(base: BaseModel, sequences: list[list[int]], share: bool = True) -> list[Tensor]:
    packed = pack(sequences, share_prefixes=share)
    with torch.no_grad():
        hidden_NE = base.hidden_states(packed, PackedAttention(packed, base.arithmetic, base.device), [])
        return [base.head([]).logits(hidden_NE[packed.rows_of(index)]) for index in range(len(sequences))]


@pytest.mark.parametrize("share", [True, False])
def test_a_pack_gives_each_sequence_the_logits_it_has_alone(
    pair: tuple[PreTrainedModel, BaseModel], share: bool
) -> None:
    library, base = pair
    for sequence, logits_TV in zip(SEQUENCES, packed_logits(base, SEQUENCES, share), strict=True):
        with torch.no_grad():
            expected_TV = library(torch.tensor([sequence]), use_cache=False).logits[0]
        torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=1e-4)


def test_changing_a_neighbour_changes_nothing(pair: tuple[PreTrainedModel, BaseModel]) -> None:
    _, base = pair
    changed = [tiny.tokens(len(sequence), 70 + index) for index, sequence in enumerate(SEQUENCES)]
    changed[1] = SEQUENCES[1]
    before, after = packed_logits(base, SEQUENCES, share=False), packed_logits(base, changed, share=False)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


def test_cached_decoding_sees_what_a_packed_forward_sees(pair: tuple[PreTrainedModel, BaseModel]) -> None:
    _, base = pair
    engine = Engine(base)
    params = SamplingParams(max_tokens=20, seed=5, stop=[])
    response = tiny.run(engine, Sample(None, ModelInput.from_ints(PROMPT), 3, params, False, 0))
    for sequence in response.sequences:
        whole = ModelInput.from_ints([*PROMPT, *sequence.tokens])
        logprobs = tiny.run(engine, ComputeLogprobs(None, whole))[len(PROMPT) :]
        assert sequence.logprobs == pytest.approx(logprobs, abs=1e-4)
