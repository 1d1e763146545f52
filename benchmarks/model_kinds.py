"""Kinds of models, tiny and random: right, or refused for a reason of theirs. None may be silently wrong.

    python benchmarks/model_kinds.py                   every kind, a line each; exits with 1 if one is not as expected
    python benchmarks/model_kinds.py phi3 mistral      kinds whose name contains a word
    python benchmarks/model_kinds.py --write           every kind, then docs/models.md

A kind is right if the engine's logprobs of sequences of four lengths, in one pass, are those of the library's eager
path for each sequence alone; if a sample's logprobs are those that the trainer gives to what was sampled; and if a
gradient reaches every factor of an adapter. The sequences are longer than windows and original contexts.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from model_kind_table import KINDS, LONG, SIZES, VOCABULARY, Kind
from transformers import AutoConfig, PreTrainedModel

from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.training.adapter import Adapter
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import Datum, LoraConfig, ModelInput, SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
LENGTHS = (LONG, 5, 40, 17)  # of the sequences of one pass, at most the context
ALLOWED = 1e-3  # nats


# ---- making one ------------------------------------------------------------------------------------------------------


def made(kind: Kind) -> PreTrainedModel:
    """The library's model, with random weights of a spread that makes every rule show."""
    config_class = type(AutoConfig.for_model(kind.model_type))
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(config_class.attribute_map)
    sizes = {} if "text_config" in kind.changes else {name: value for name, value in SIZES.items() if name in known}
    config = config_class(**sizes | kind.changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, kind.class_name)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    embedding = model.get_input_embeddings().weight
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(noise * 0.2)
        else:
            parameter.copy_(noise * (0.3 if parameter is embedding else 1.5 / parameter.shape[-1] ** 0.5))
    return model


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY - 8, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- judging it ------------------------------------------------------------------------------------------------------


def run(engine: Engine, op: ops.Op) -> Any:
    ticket = engine.submit(op)
    while not engine.idle:
        for done in engine.step():
            if done.ticket is ticket:
                if done.error is not None:
                    raise done.error
                return done.result
    raise AssertionError("the engine lost a ticket")


ADAPTER = ops.AdapterId("adapter")


def new_adapter(engine: Engine) -> tuple[Adapter, str]:
    """`ADAPTER`, which trains all that can be trained, and what that is. Its B is zero, so it changes nothing."""
    wanted = {"attn": True, "mlp": True, "unembed": True}
    while True:
        try:
            config = LoraConfig(rank=2, seed=0, **{f"train_{part}": on for part, on in wanted.items()})
            run(engine, ops.CreateAdapter(ADAPTER, config))
            return engine.adapters.by_id[ADAPTER], ", ".join(part for part, on in wanted.items() if on)
        except InvalidRequest as error:
            part = str(error).partition("train_")[2].partition("=")[0]
            if not wanted.get(part):
                raise
            wanted[part] = False


def trained(engine: Engine, sequences: list[list[int]], *, backward: bool = False) -> list[list[float]]:
    """The trainer's logprobs, all sequences in one pass."""
    data = [
        Datum(
            ModelInput.from_ints(sequence[:-1]),
            {"target_tokens": sequence[1:], "weights": [1.0] * (len(sequence) - 1)},
        )
        for sequence in sequences
    ]
    op = (ops.ForwardBackward if backward else ops.Forward)(ADAPTER, data, CrossEntropy())
    return [list(output["logprobs"].data) for output in run(engine, op).loss_fn_outputs]


@torch.no_grad()
def by_library(model: PreTrainedModel, sequence: list[int]) -> list[float]:
    logits_TV = model(torch.tensor([sequence[:-1]]), use_cache=False).logits[0].float()
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()


@dataclass(frozen=True)
class Verdict:
    """How one kind came out."""

    kind: Kind
    what: str  # right, refused or WRONG
    said: str
    context: int = 0
    trains: str = ""

    @property
    def is_as_expected(self) -> bool:
        return self.what == "refused" and self.kind.refused in self.said if self.kind.refused else self.what == "right"


def judge(kind: Kind) -> Verdict:
    started = time.perf_counter()
    try:
        base = adopt(made(kind), kind.name, fingerprint=kind.name)
    except InvalidRequest as error:
        return Verdict(kind, "refused", str(error))
    seconds = time.perf_counter() - started
    engine = Engine(base)
    adapter, trains = new_adapter(engine)
    context = base.limits.context_length
    sequences = [tokens(min(length, context), length) for length in LENGTHS]
    library = made(kind)
    packed = worst(trained(engine, sequences), [by_library(library, sequence) for sequence in sequences])
    prompt = tokens(min(30, context - 16), 7)
    response = run(
        engine,
        ops.Sample(None, ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=12, seed=1, stop=[]), False, 0),
    )
    answers = [(answer.tokens, list(answer.logprobs or ())) for answer in response.sequences]
    again = trained(engine, [[*prompt, *drawn] for drawn, _ in answers], backward=True)
    gap = worst([logprobs for _, logprobs in answers], [own[len(prompt) - 1 :] for own in again])
    still = [
        name for name, gradient in adapter.gradients.items() if name.endswith(".B") and not gradient.abs().max() > 0
    ]
    said = f"packed {packed:.1e}, sampled {gap:.1e}, loaded in {seconds:.2f} s" + (
        f", no gradient: {still[:2]}" if still else ""
    )
    is_right = packed < ALLOWED and gap < ALLOWED and not still
    return Verdict(kind, "right" if is_right else "WRONG", said, context, trains)


def worst(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest difference; infinite where there is a NaN."""
    pairs = [pair for own, other in zip(ours, theirs, strict=True) for pair in zip(own, other, strict=True)]
    difference = max(abs(a - b) for a, b in pairs)
    return difference if all(a == a and b == b for a, b in pairs) else float("inf")


# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = f"""\
# Models

Any decoder-only model of transformers runs whose layers all are softmax attention that we can exchange for ours.
Whether one does is proven when it is loaded: its files are whole, a small copy of its config gives what transformers
gives with sequences of several lengths in one pass, and so does the model itself. What fails is refused by name.

Below are the kinds that `python benchmarks/model_kinds.py --write` has tried, tiny and with random weights, beside
neighbours in a pass and from a cache. Windows and original contexts were shorter than the sequences of up to {LONG}
tokens. Experts in one tensor are not trained (`train_mlp=False`), nor are the transposed weights of GPT-2's kind.

"""


def page(verdicts: list[Verdict]) -> str:
    lines = [INTRODUCTION, "## Right\n\n| Class | Tried | An adapter trains |\n|---|---|---|\n"]
    by_class: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.what == "right":
            by_class.setdefault(verdict.kind.class_name, []).append(verdict)
    for class_name, own in sorted(by_class.items()):
        notes = "; ".join(sorted({verdict.kind.note or "as it is" for verdict in own}))
        lines.append(f"| {class_name} | {notes} | {own[0].trains} |\n")
    lines.append("\n## Refused\n\n| Class | Tried | Because |\n|---|---|---|\n")
    for verdict in sorted(verdicts, key=lambda verdict: verdict.kind.name):
        if verdict.what == "refused":
            lines.append(
                f"| {verdict.kind.class_name} | {verdict.kind.note or 'as it is'} | {verdict.kind.because} |\n"
            )
    return "".join(lines)


def judged(words: list[str]) -> Iterator[Verdict]:
    for kind in KINDS:
        if not words or any(word in kind.name for word in words):
            yield judge(kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts = []
    for verdict in judged(arguments.words):
        verdicts.append(verdict)
        mark = "" if verdict.is_as_expected else "   <- not as expected"
        print(f"{verdict.kind.name:44} {verdict.what:8} {verdict.said[:160]}{mark}", flush=True)
    surprises = [verdict.kind.name for verdict in verdicts if not verdict.is_as_expected]
    counts = {what: sum(verdict.what == what for verdict in verdicts) for what in ("right", "refused", "WRONG")}
    print(f"{len(verdicts)} kinds: {counts}; not as expected: {surprises or 'none'}")
    if arguments.write and not surprises and not arguments.words:
        PAGE.write_text(page(verdicts), encoding="utf-8")
    return bool(surprises)


if __name__ == "__main__":
    sys.exit(main())
