"""What one CUDA card does with random weights in the shapes of real models, and how far from its ceilings that is.

    python benchmarks/gpu.py                # at most four minutes; a table comes last
    python benchmarks/gpu.py --untried      # the same with what is off otherwise (engine/untried)
    python benchmarks/gpu.py --smoke        # every line of it on a CPU, with tiny shapes

Needs torch, transformers, safetensors, numpy and peft; the package need not be installed. Ceilings are measured first:
copying (bytes read and written) and a large bfloat16 matrix product. Shares count what a step cannot do without:

    training   4·N + 6·layers·heads·head_size·context FLOPs a token: forward, and backward to the activations; adapters
               and recomputation are not counted
    decoding   per step, each weight of the linears once and each key and value of the batch once

`N` is the number of weights in the linears, the head included.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.untried.captured import on_cuda
from stovetop.engine.untried.ragged_attention import by_ragged_kernel
from stovetop.losses import CrossEntropy, ImportanceSampling
from stovetop.types import AdamParams, Datum, LoraConfig, ModelInput, SampledSequence, SamplingParams

RANK = 16
PROMPT_TOKENS = 512
SHAPES: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen3-4B": Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, on what."""

    device: str
    dtype: torch.dtype
    shapes: dict[str, PreTrainedConfig]
    contexts: tuple[int, ...] = (2048, 16384)
    step_tokens: int = 8192  # of a training step, or one sequence of the context if that is longer
    batches: tuple[int, ...] = (64, 256)
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = 64
    copied_bytes: int = 2**31
    matrix: int = 8192
    untried: bool = False


def smoke_plan() -> Plan:
    small = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return Plan("cpu", torch.float32, {"tiny": small}, (16, 64), 48, (2, 4), 12, 6, 2**20, 64)


@dataclass(slots=True)
class Line:
    """One line of the table. Numbers that were not reached are None."""

    model: str
    what: str
    unit: str
    ours: float | None = None
    share: float | None = None  # of the ceiling
    peer: float | None = None
    note: str = ""


Attempt = Callable[[Line, Callable[[], None]], None]  # fills a line by measuring, or notes why not


# ---- clocks and ceilings ---------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best(run: Callable[[], object], device: str, times: int = 5) -> float:
    return min(seconds(run, device) for _ in range(times + 1))


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_s: float
    flops: float


def measure_ceilings(plan: Plan) -> Ceilings:
    source = torch.empty(plan.copied_bytes, dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    copying = best(lambda: target.copy_(source), plan.device)
    left, right = (torch.randn(plan.matrix, plan.matrix, device=plan.device).to(plan.dtype) for _ in range(2))
    product = best(lambda: left @ right, plan.device)
    return Ceilings(2 * plan.copied_bytes / copying, 2 * plan.matrix**3 / product)


# ---- what a model must do --------------------------------------------------------------------------------------------


def num_linear_weights(config: PreTrainedConfig) -> int:
    """Of the linears and the head, by the shapes of the two families here."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    attention = hidden * size * (2 * heads + 2 * config.num_key_value_heads)
    return config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size) + hidden * config.vocab_size


def training_flops(config: PreTrainedConfig, context: int) -> float:
    """A token."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * size * context
    return 4 * num_linear_weights(config) + 6 * attention


def decoding_bytes(config: PreTrainedConfig, batch: int, context: int, item: int) -> float:
    """A step."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * size * context * batch
    return item * (num_linear_weights(config) + cache)


def random_model(config: PreTrainedConfig, plan: Plan, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(plan.device):
        return AutoModelForCausalLM.from_config(config, dtype=plan.dtype, attn_implementation=attention).eval()


def random_tokens(config: PreTrainedConfig, shape: tuple[int, int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, shape, generator=generator).tolist()


# ---- ours ------------------------------------------------------------------------------------------------------------


def do(engine: Engine, operations: Sequence[ops.Op]) -> list[Any]:
    """Submits all, steps until all are done; their results, or the first error."""
    tickets = [engine.submit(op) for op in operations]
    ended: dict[int, ops.Finished] = {}
    while not engine.idle:  # also after an error: nothing is left for the next measurement
        ended |= {done.ticket.number: done for done in engine.step()}
    for ticket in tickets:
        error = ended[ticket.number].error
        if error is not None:
            raise error
    return [ended[ticket.number].result for ticket in tickets]


def sampling(prompts: list[list[int]], new_tokens: int, weights: ops.WeightsId | None = None) -> list[ops.Op]:
    return [
        ops.Sample(
            weights,
            ModelInput.from_ints(prompt),
            1,
            SamplingParams(max_tokens=new_tokens, seed=index, stop=[]),
            False,
            0,
        )
        for index, prompt in enumerate(prompts)
    ]


def datum(tokens: list[int]) -> Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def ours(name: str, plan: Plan, ceilings: Ceilings, attempt: Attempt, lines: dict[str, Line]) -> None:
    config = plan.shapes[name]
    model = random_model(config, plan, "eager")
    kernel = by_ragged_kernel if plan.untried else None
    base = adopt(model, name, fingerprint=name, device=plan.device, pack_kernel=kernel)
    engine = Engine(base, record_decoding=on_cuda if plan.untried else None)
    adapter = ops.AdapterId("adapter")
    do(engine, [ops.CreateAdapter(adapter, LoraConfig(rank=RANK, seed=0, train_unembed=False))])
    item = plan.dtype.itemsize

    def train(context: int) -> None:
        data = [datum(tokens) for tokens in random_tokens(config, train_shape(plan, context), context)]
        step = [ops.ForwardBackward(adapter, data, CrossEntropy()), ops.OptimStep(adapter, AdamParams())]
        do(engine, step)
        rate = num_tokens(plan, context) / seconds(lambda: do(engine, step), plan.device)
        line = lines[f"train {context}"]
        line.ours, line.share = rate, rate * training_flops(config, context) / ceilings.flops

    def decode(batch: int) -> None:
        for seed in (1, 5):  # the second records the passes that the first was the first to make
            do(engine, sampling(random_tokens(config, (batch, plan.prompt_tokens), seed), 1 + plan.new_tokens))
        first = seconds(
            lambda: do(engine, sampling(random_tokens(config, (batch, plan.prompt_tokens), 2), 1)), plan.device
        )
        whole = seconds(
            lambda: do(engine, sampling(random_tokens(config, (batch, plan.prompt_tokens), 3), 1 + plan.new_tokens)),
            plan.device,
        )
        steps_per_s = plan.new_tokens / (whole - first)
        context = plan.prompt_tokens + plan.new_tokens // 2
        line = lines[f"decode {batch}"]
        line.ours = batch * steps_per_s
        line.share = steps_per_s * decoding_bytes(config, batch, context, item) / ceilings.bytes_per_s
        lines["prefill"].ours = batch * plan.prompt_tokens / first

    def gap() -> None:
        weights = ops.WeightsId("frozen")
        do(engine, [ops.Freeze(adapter, weights)])
        prompts = random_tokens(config, (8, plan.prompt_tokens), 4)
        responses = do(engine, sampling(prompts, plan.new_tokens, weights))
        sequences: list[SampledSequence] = [response.sequences[0] for response in responses]
        data = [scoring_datum(prompt, one) for prompt, one in zip(prompts, sequences, strict=True)]
        [output] = do(engine, [ops.Forward(adapter, data, ImportanceSampling())])
        gaps = [
            torch.tensor(scored["logprobs"].data[-len(one.tokens) :]) - torch.tensor(one.logprobs)
            for one, scored in zip(sequences, output.loss_fn_outputs, strict=True)
        ]
        lines["gap"].ours = torch.cat(gaps).abs().max().item()

    for context in plan.contexts:
        attempt(lines[f"train {context}"], lambda context=context: train(context))
    for batch in plan.batches:
        attempt(lines[f"decode {batch}"], lambda batch=batch: decode(batch))
    attempt(lines["gap"], gap)


def scoring_datum(prompt: list[int], sequence: SampledSequence) -> Datum:
    tokens, zeros = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*zeros, *(sequence.logprobs or [])],
        "advantages": [1.0] * (len(tokens) - 1),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def train_shape(plan: Plan, context: int) -> tuple[int, int]:
    """Sequences, and tokens of each: one more than it trains on."""
    return max(1, plan.step_tokens // context), context + 1


def num_tokens(plan: Plan, context: int) -> int:
    return max(1, plan.step_tokens // context) * context


# ---- transformers + PEFT, and generate -------------------------------------------------------------------------------


def theirs(name: str, plan: Plan, attempt: Attempt, lines: dict[str, Line]) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = plan.shapes[name]
    model = random_model(config, plan, "sdpa")

    def generate(batch: int) -> None:
        model.generation_config.eos_token_id = None
        took = []
        for tokens in (2, 1, 1 + plan.new_tokens):  # the first is for warming up
            prompts = torch.tensor(random_tokens(config, (batch, plan.prompt_tokens), tokens), device=plan.device)
            options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": tokens}
            took.append(
                seconds(
                    lambda p=prompts, o=options: model.generate(p, attention_mask=torch.ones_like(p), **o), plan.device
                )
            )
        lines[f"decode {batch}"].peer = batch * plan.new_tokens / (took[2] - took[1])
        lines["prefill"].peer = batch * plan.prompt_tokens / took[1]

    for batch in plan.batches:
        attempt(lines[f"decode {batch}"], lambda batch=batch: generate(batch))
    peft_model = get_peft_model(model, PeftConfig(r=RANK, target_modules="all-linear")).train()
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], 1e-4)

    def step(context: int) -> None:
        tokens = torch.tensor(random_tokens(config, train_shape(plan, context), context), device=plan.device)
        peft_model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(context: int) -> None:
        step(context)
        took = seconds(lambda: step(context), plan.device)
        lines[f"train {context}"].peer = num_tokens(plan, context) / took

    def train_with_recomputation(context: int) -> None:
        peft_model.gradient_checkpointing_enable()
        peft_model.enable_input_require_grads()
        lines[f"train {context}"].note = "the peer recomputes activations"
        train(context)

    for context in plan.contexts:
        line = lines[f"train {context}"]
        attempt(line, lambda context=context: train(context))
        if line.peer is None and "memory" in line.note:
            attempt(line, lambda context=context: train_with_recomputation(context))


# ---- all of it -------------------------------------------------------------------------------------------------------


def lines_of(plan: Plan, name: str) -> dict[str, Line]:
    training = {f"train {c}": Line(name, f"training, context {c}", "tokens/s") for c in plan.contexts}
    decoding = {f"decode {b}": Line(name, f"decoding, batch {b}", "tokens/s") for b in plan.batches}
    rest = {
        "prefill": Line(name, f"prompts of {plan.prompt_tokens}", "tokens/s"),
        "gap": Line(name, "gap, largest", "nats"),
        "memory": Line(name, "peak memory", "GB"),
    }
    return training | decoding | rest


@dataclass(slots=True)
class Run:
    """Measurements one after the other, each of which may fail, until time is up."""

    plan: Plan
    ends_at: float
    failed: bool = False

    def attempt(self, line: Line, measure: Callable[[], None]) -> None:
        if time.monotonic() > self.ends_at:
            line.note = line.note or "time was up"
            return
        try:
            measure()
        except torch.OutOfMemoryError:
            line.note = "out of memory"
        except Exception as error:  # the others are still worth having; the exit code tells
            traceback.print_exc()
            line.note, self.failed = f"{type(error).__name__}: {error}"[:60], True

    def model(self, name: str, ceilings: Ceilings) -> list[Line]:
        lines = lines_of(self.plan, name)
        memory = lines["memory"]
        take_peak(self.plan.device)
        self.attempt(memory, lambda: ours(name, self.plan, ceilings, self.attempt, lines))
        memory.ours = take_peak(self.plan.device)
        self.attempt(memory, lambda: theirs(name, self.plan, self.attempt, lines))
        memory.peer = take_peak(self.plan.device)
        return list(lines.values())


def take_peak(device: str) -> float | None:
    """Gigabytes of the card that were in use at most since the last call. What nobody holds any more is let go."""
    gc.collect()
    if device != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def print_table(lines: list[Line]) -> None:
    number = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
    print(f"{'model':<14}{'':<26}{'stovetop':>12} {'':<9}{'of ceiling':>10}{'transformers':>14}{'ratio':>7}  note")
    for line in lines:
        form = ".2g" if line.unit == "nats" else ".1f" if line.unit == "GB" else ",.0f"
        ratio = line.ours / line.peer if line.ours and line.peer else None
        print(
            f"{line.model:<14}{line.what:<26}{number(line.ours, form):>12} {line.unit:<9}"
            f"{number(line.share, '.0%'):>10}{number(line.peer, form):>14}{number(ratio, '.2f'):>7}  {line.note}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--untried", action="store_true", help="with the parts of the engine that are off otherwise")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=230, help="begin no measurement after this many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA card here; --smoke runs tiny shapes on the CPU")
    chosen = {name: SHAPES[name] for name in options.models}
    plan = smoke_plan() if options.smoke else Plan("cuda", torch.bfloat16, chosen, untried=options.untried)
    run = Run(plan, time.monotonic() + options.seconds)
    card = "CPU" if options.smoke else torch.cuda.get_device_name()
    ceilings = measure_ceilings(plan)
    lines: list[Line] = []
    for name in plan.shapes:
        lines += run.model(name, ceilings)
        print(f"{name} is done", flush=True)
    print(f"\n{card}, torch {torch.__version__}, transformers {transformers.__version__}, {plan.dtype}")
    print(f"ceilings: copying {ceilings.bytes_per_s / 1e9:,.0f} GB/s, products {ceilings.flops / 1e12:,.1f} TFLOP/s")
    print_table(lines)
    if options.json:
        figures = {"card": card, "ceilings": asdict(ceilings), "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(figures, indent=1))
    return 1 if run.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
