"""A seeded random Llama of vocabulary 512, and what tests of the engine do with it."""

import functools
import weakref
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from stovetop.backends.custom_loss import judge
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import AdapterWeights, Moments
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.training.adapter import Adapter
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, ModelInput

VOCAB_SIZE = 512
CONTEXT_LENGTH = 256


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.2,  # spreads the logits, so that tokens differ in probability
        "bos_token_id": None,
        "eos_token_id": 257,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes, attn_implementation="eager"))


@functools.cache
def base_model() -> BaseModel:
    return adopt(llama(), "tiny", fingerprint="tiny", tokenizer=tokenizer())


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def save_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    (model or llama()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def engine(**settings: Any) -> Engine:
    return Engine(base_model(), **settings)


def kv_bytes(num_positions: int, model: BaseModel | None = None) -> int:
    """The `max_kv_bytes` with which all caches together may have so many positions."""
    budget = KVBudget(1, (model or base_model()).kv_bytes)
    return num_positions * (budget.position_bytes + max(budget.layer_bytes))


class AdapterHandle(str):
    """The id of an adapter, which shows what the engine has of it."""

    engine: Engine

    @classmethod
    def of(cls, engine: Engine, name: str) -> "AdapterHandle":
        handle = cls(name)
        handle.engine = engine
        return handle

    @property
    def adapter(self) -> Adapter:
        return self.engine.adapters.by_id[self]  # pyright: ignore[reportArgumentType]  an id is a string

    @property
    def weights(self) -> AdapterWeights:
        return self.adapter.weights

    @weights.setter
    def weights(self, weights: AdapterWeights) -> None:
        self.adapter.weights = weights

    @property
    def moments(self) -> Moments:
        return self.adapter.moments

    @property
    def gradients(self) -> Any:
        return self.adapter.gradients

    @gradients.setter
    def gradients(self, gradients: Any) -> None:
        self.adapter.gradients = gradients


NAMED: "weakref.WeakValueDictionary[str, AdapterWeights]" = weakref.WeakValueDictionary()  # that a test made itself


def named(weights: AdapterWeights | None) -> Any:
    """The id under which ops name weights; `submit` makes the engine know them."""
    if weights is None:
        return None
    name = f"weights {id(weights)}"
    NAMED[name] = weights
    return name


def submit(engine: Engine, op: ops.Op) -> ops.Ticket:
    if isinstance(op, ops.SamplingOp) and op.weights in NAMED:
        engine.adapters.weights[op.weights] = NAMED[op.weights]
        ticket = engine.submit(op)
        del engine.adapters.weights[op.weights]  # the request has them
        return ticket
    return engine.submit(op)


def run(engine: Engine, op: ops.Op) -> Any:
    """The op's result, once it is there, and written if it is a save."""
    ticket = submit(engine, op)
    while not engine.idle:
        for done in engine.step():
            if done.ticket is ticket:
                if done.error is not None:
                    raise done.error
                if isinstance(done.result, ops.Snapshot):
                    done.result.write()
                return done.result
    raise AssertionError("the engine lost a ticket")


def run_custom(engine: Engine, adapter: Any, data: list[Datum], loss_fn: Any) -> ForwardBackwardOutput:
    """What a client does for a custom loss."""
    scored = ops.ScoreId(f"scored {id(data)}")
    output = run(engine, ops.Score(adapter, data, scored))
    try:
        loss, metrics, gradients = judge(loss_fn, data, [each["logprobs"] for each in output.loss_fn_outputs])
    except Exception as error:
        run(engine, ops.Spoil(adapter, str(error), scored))
        raise
    run(engine, ops.BackwardFrom(adapter, scored, gradients))
    return ForwardBackwardOutput("logprobs", output.loss_fn_outputs, {**metrics, "loss:sum": loss})


def create(engine: Engine, config: LoraConfig) -> Any:
    """A new adapter."""
    name = ops.AdapterId(f"adapter {len(engine.adapters.by_id)}")
    run(engine, ops.CreateAdapter(name, config))
    return AdapterHandle.of(engine, name)


def load(engine: Engine, path: Path, with_optimizer: bool) -> Any:
    name = ops.AdapterId(f"adapter {len(engine.adapters.by_id)}")
    run(engine, ops.LoadAdapter(name, path, with_optimizer))
    return AdapterHandle.of(engine, name)


def freeze(engine: Engine, adapter: Any) -> AdapterWeights:
    name = ops.WeightsId(f"frozen {len(engine.adapters.weights)}")
    run(engine, ops.Freeze(adapter, name))
    return engine.adapters.weights.pop(name)


def load_weights(engine: Engine, path: Path) -> AdapterWeights:
    name = ops.WeightsId(f"frozen {len(engine.adapters.weights)}")
    run(engine, ops.LoadWeights(name, path))
    return engine.adapters.weights.pop(name)


def trained_adapter(engine: Engine, seed: int = 0, **lora: Any) -> Any:
    """An adapter whose B is not zero, so that it changes the model."""
    adapter = create(engine, LoraConfig(**{"rank": 8, "seed": seed} | lora))
    adapter.weights = with_nonzero_b(adapter.weights, seed)
    return adapter


def with_nonzero_b(weights: AdapterWeights, seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(t.shape, generator=generator) * 0.05 if name.endswith(".B") else t
        for name, t in weights.tensors.items()
    }
    return AdapterWeights(weights.config, tensors)


def tokens(length: int, seed: int, first: list[int] | None = None) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (first or []) + torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def datum(sequence: list[int], weight: float = 1.0) -> Datum:
    """Cross-entropy on every token but the first."""
    inputs = {"target_tokens": sequence[1:], "weights": [weight] * (len(sequence) - 1)}
    return Datum(ModelInput.from_ints(sequence[:-1]), inputs)


def rl_datum(sequence: list[int], seed: int) -> Datum:
    """Sampling logprobs near -6 (the level of a vocabulary of 512) and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    length = len(sequence) - 1
    return Datum(
        ModelInput.from_ints(sequence[:-1]),
        {
            "target_tokens": sequence[1:],
            "logprobs": torch.randn(length, generator=generator) * 0.3 - 6.0,
            "advantages": torch.randn(length, generator=generator),
        },
    )


SGD = AdamParams(learning_rate=1e-2, eps=1e-8)
