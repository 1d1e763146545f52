"""Writes docs/losses.md: every loss with its formula, what its data hold, and its options.

    python docs/make_losses.py

Names, formulas and options are those of `losses.py`, `preference/loss_values.py` and `distillation/losses.py`. A test
fails when the page is not what this writes.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from stovetop.cli.configs import config_fields
from stovetop.distillation.losses import ForwardKL, GeneralizedJSD, ReverseKL
from stovetop.losses import LOSSES
from stovetop.preference.loss_values import PREFERENCE_LOSSES, needs_reference

PAGE = Path(__file__).parent / "losses.md"

INTRODUCTION = """\
# Losses

This page is written by `python docs/make_losses.py`, from the code.

Three things are the same for all losses of `forward_backward`:

- A loss is a **sum over the tokens** of every datum of the call. Nothing is averaged for you: not over tokens, not over
  sequences, not over the calls of one step. To train on a mean, divide weights or advantages yourself; AdamW's step hardly
  depends on the scale of the loss, clipping by `grad_clip_norm` does.
- Calls of `forward_backward` before an `optim_step` add up their gradients.
- Position t of a datum holds the token that the model sees there, and `target_tokens[t]` the one that it is to predict.
  A position that is not to be trained has weight 0, or advantage 0.

Every answer has `loss:sum` among its metrics, and the log-probability of each target token, at the weights that the
step began with, as `loss_fn_outputs[i]["logprobs"]`. All of it is float32, whatever the base model is held in.

## By name: `forward_backward(data, loss_fn, loss_fn_config)`

In the formulas p is the current model's log-probability of a target token and q the sampler's (`logprobs`), r = exp(p - q),
w a weight, A an advantage, sg(.) stops the gradient. `importance_sampling`, `ppo`, `cispo`, `dro` and `gspo` divide the
logits by their option `temperature` before p is computed: give the temperature that the tokens were sampled at.
"""

PREFERENCE = """\
## On pairs of answers: `dpo` and its kin

They are a **mean over pairs**, and are computed by `forward_backward_custom` with what
`preference.losses.preference_loss_fn` returns; the workflow `preference` does that. c and r are the summed log-probabilities
of the chosen and the rejected answer, c' and r' those under the reference, |c| and |r| the numbers of tokens, the end of the
turn included, and σ is the logistic function. m = (c - c') - (r - r') is the margin before β.
"""

DIVERGENCES = """\
## On whole distributions: distillation

`distillation.losses.divergence_loss_fn` makes a loss for `forward_backward_custom` of one of these: the sum over positions
of weight times divergence, over the teacher's K most probable tokens and all others together as one. p is the teacher's
distribution over the next token and q the student's.
"""

YOUR_OWN = """\
## A loss of your own

`forward_backward_custom(data, function)`: a function of the data and of the log-probabilities of each datum's target
tokens; [verbs.md](verbs.md) has one. It costs a second forward pass.

## What is not here

`stable_reinforce` is refused: its formula is not public. A penalty on the distance to a reference (KL) is not part of a
loss: it becomes part of the advantages ([rl.md](rl.md)).
"""


def page() -> str:
    """The page as it should be."""
    return "\n".join(line for part in _parts() for line in part)


def _parts() -> Iterator[Iterator[str] | list[str]]:
    yield [INTRODUCTION]
    for name, loss in LOSSES.items():
        yield _section(f"`{name}`", loss, ["Reads " + ", ".join(f"`{field}`" for field in loss.inputs) + "."])
    yield [PREFERENCE]
    for name, loss in PREFERENCE_LOSSES.items():
        needs = "Compares with a reference." if needs_reference(loss()) else "Needs no reference."
        yield _section(f"`{name}`", loss, [needs])
    yield [DIVERGENCES]
    for divergence in (ForwardKL, ReverseKL, GeneralizedJSD):
        yield _section(f"`{divergence.__name__}`", divergence, [])
    yield [YOUR_OWN.rstrip() + "\n"]


def _section(title: str, loss: type, more: list[str]) -> Iterator[str]:
    yield f"### {title}\n"
    yield (inspect.getdoc(loss) or "") + "\n"
    yield from [f"{line}\n" for line in more]
    if fields := config_fields(loss):
        yield "| option | default | |"
        yield "|---|---|---|"
        for field in fields:
            yield f"| `{field.name}` | {field.default} | {field.meaning or field.accepts} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
