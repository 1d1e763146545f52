"""Names of the linears that an adapter may train, here and in PEFT's files. No torch."""

from typing import Literal

Part = Literal["attn", "mlp", "unembed"]

HEAD = "lm_head"  # the output head; every other target has the path of its module in the base model

PREFIX = "base_model.model."  # what PEFT writes before the path
FACTORS = {"A": "lora_A.weight", "B": "lora_B.weight"}  # and behind it


def part_of(target: str) -> Part:
    """What trains it: `train_attn`, `train_mlp` or `train_unembed`."""
    if target == HEAD:
        return "unembed"
    return "attn" if any("attn" in piece or "attention" in piece for piece in target.split(".")) else "mlp"


def split_peft_name(name: str) -> tuple[str, str] | None:
    """ "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" -> "model.layers.0.self_attn.q_proj", "A"; None
    for the name of anything else."""
    for factor, ending in FACTORS.items():
        if name.startswith(PREFIX) and name.endswith(f".{ending}"):
            return name.removeprefix(PREFIX).removesuffix(f".{ending}"), factor
    return None


FROZEN_HEAD = f"{PREFIX}{HEAD}.base_layer.weight"  # PEFT saves the base model's head beside an adapter that trains it


def peft_name(target: str, factor: str) -> str:
    """The other way round."""
    return f"{PREFIX}{target}.{FACTORS[factor]}"


TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # names of linears of a module with one input


def input_of(name: str) -> str:
    """The same for linears that read the same input."""
    parent, _, own = name.rpartition(".")
    return next((f"{parent}:{index}" for index, names in enumerate(TOGETHER) if own in names), name)
