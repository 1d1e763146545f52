# pyright: basic
"""A small copy of a model's config that asks for everything the model asks for: two layers of each kind of layer, few
heads (their size and their number per key/value head are kept), few experts, a short vocabulary, and windows, soft caps
and other limits so low that a sequence of `LONGEST` tokens goes beyond them.

What the copy cannot keep, it says: `Uncuttable` names it, and the model is refused.
"""

import copy
import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from stovetop.engine.model.decoder_layers import EXPERT_COUNTS, find_layers

LONGEST = 44  # tokens of a sequence that the copy is tried with
WINDOW, ORIGINAL_CONTEXT, CONTEXT = 6, 20, 64  # of the copy, at most; in tokens
SOFT_CAP = 2.0  # of the copy, at most: random scores and logits reach it
VOCABULARY, EXPERTS, QUERY_HEADS = 512, 8, 8  # at most; more heads where more share the same keys
WIDTH, INNER_WIDTH = 64, 96  # at most, where the config gives the heads a size of their own
NUM_SPECIAL = 32  # ids at the end of the vocabulary, for tokens with a meaning of their own

_THRESHOLD = re.compile(r"window|chunk|floor_scale|local_attention")
_NO_THRESHOLD = re.compile(r"layer|pattern|feed_forward|max_window_layers")
_WIDTH = re.compile(r"intermediate|ffn|ff_dim|inner|d_ff|mlp_dim|lora_rank")
_INDEX = re.compile(r"(^|_)(idx|index|layer_id|layer_number)$")


class Uncuttable(Exception):
    """Why there is no small copy."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """One config, or one of its parts, by the library's general names."""

    values: dict[str, Any]
    own_names: dict[str, str]  # general name -> the config's own

    def get(self, name: str) -> Any:
        return self.values.get(self.own_names.get(name, name))

    def set(self, name: str, value: Any) -> None:
        own = self.own_names.get(name, name)
        if self.values.get(own) is not None:
            self.values[own] = value


def cut_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The small copy of the config of a model, whose layers tell how many kinds of them there are."""
    kinds = kinds_of_layers(model)
    depth = next(n for n in range(1, len(kinds) + 1) if all(_enough(kind, kinds, n) for kind in kinds))
    problems = []
    # a rule that counts layers from the end needs all of them; some models want heads as wide as the hidden state
    for num_layers, narrow in itertools.product(dict.fromkeys((depth, len(kinds))), (True, False)):
        try:
            config = _cut(model.config, num_layers, len(kinds), narrow)
            small = type(model)(copy.deepcopy(config)).eval()
            small(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except Exception as error:  # whatever a config's own checks, a model's constructor and its layers raise
            problems.append(f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}")
            continue
        if [kind.traits for kind in kinds_of_layers(small)] == [kind.traits for kind in kinds[:num_layers]]:
            return config
        problems.append(f"its first {num_layers} layers come out as others")
    raise Uncuttable("; ".join(dict.fromkeys(problems)))


def _enough(kind: "Kind", kinds: "list[Kind]", n: int) -> bool:
    return kinds[:n].count(kind) >= min(2, kinds.count(kind))


# ---- kinds of layers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes one layer from another."""

    traits: tuple[object, ...]  # those that a copy of other widths has too
    sizes: tuple[object, ...]  # shapes and numbers


def kinds_of_layers(model: PreTrainedModel) -> list[Kind]:
    """By what the config lists for each layer, and by the modules of each layer with their settings."""
    config = model.config.get_text_config()
    found = find_layers(model.base_model)  # pyright: ignore[reportArgumentType]  it is one of the library's models
    if found is None:
        raise Uncuttable(f"it has no list of {config.num_hidden_layers} decoder layers, as its config says")
    count = len(found.layers)
    listed = [value for value in vars(config).values() if isinstance(value, list | tuple) and len(value) == count]
    return [_kind(layer, [repr(value[index]) for value in listed]) for index, layer in enumerate(found.layers)]


def _kind(layer: nn.Module, listed: list[str]) -> Kind:
    traits: set[tuple[object, ...]] = set()
    sizes: set[tuple[object, ...]] = set()
    for name, module in layer.named_modules():
        place = re.sub(r"\d+", "*", name)
        traits.add((place, type(module).__name__))
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, bool | str) or value is None:
                traits.add((place, key, value))
            elif isinstance(value, int | float) and not _INDEX.search(key):
                traits.add((place, key, "a number"))
                sizes.add((place, key, value))
        for key, parameter in module.named_parameters(recurse=False):
            traits.add((place, key, parameter.dim()))
            sizes.add((place, key, tuple(parameter.shape)))
    return Kind(tuple(sorted(traits, key=repr)), (*listed, *sorted(sizes, key=repr)))


# ---- the copy --------------------------------------------------------------------------------------------------------


def _cut(config: PreTrainedConfig, num_layers: int, of_layers: int, narrow: bool) -> PreTrainedConfig:
    values = config.to_dict()
    values.pop("quantization_config", None)
    text = config.get_text_config()
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(values.get(name), dict):
            if part is text:
                _cut_text(_Cut(values[name], dict(part.attribute_map)), num_layers, of_layers, narrow)
            else:
                _cut_tower(_Cut(values[name], dict(part.attribute_map)))
    own = _Cut(values, dict(config.attribute_map))
    if text is config:
        _cut_text(own, num_layers, of_layers, narrow)
    else:
        _move_special_tokens(own, VOCABULARY)
    values["dtype"] = "float32"
    small = type(config).from_dict(values)
    small._attn_implementation = "eager"
    return small


def _cut_text(cut: _Cut, num_layers: int, of_layers: int, narrow: bool) -> None:
    _cut_lists(cut, num_layers, of_layers)
    _cut_widths(cut, narrow)
    _cut_experts(cut)
    _lower_thresholds(cut)
    vocabulary = cut.get("vocab_size")
    for key, value in cut.values.items():
        if "vocab_size" in key and isinstance(value, int):
            cut.values[key] = min(value, VOCABULARY)
    _move_special_tokens(cut, min(vocabulary, VOCABULARY))


def _cut_tower(cut: _Cut) -> None:
    """A vision or audio part: no text passes through it, so one small layer will do."""
    cut.set("num_hidden_layers", 1)
    _cut_widths(cut, narrow=False)


def _cut_lists(cut: _Cut, num_layers: int, of_layers: int) -> None:
    cut.set("num_hidden_layers", num_layers)
    for key, value in cut.values.items():
        if isinstance(value, list | tuple) and len(value) == of_layers:
            cut.values[key] = list(value[:num_layers])


def _cut_widths(cut: _Cut, narrow: bool) -> None:
    """Fewer heads of the same size, and everything that is as wide as the model becomes narrower: as far as `narrow`
    goes where the config has a place for the size of a head, else in proportion to the heads."""
    heads, hidden = cut.get("num_attention_heads"), cut.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    key_heads = cut.get("num_key_value_heads")
    repeats = heads // key_heads if isinstance(key_heads, int) and key_heads else 1
    free = narrow and "head_dim" in cut.values
    fewer_key_heads = min(heads // repeats, 2 if 2 * repeats <= (QUERY_HEADS if free else QUERY_HEADS // 2) else 1)
    fewer = fewer_key_heads * (repeats if key_heads != 1 else min(repeats, QUERY_HEADS // 2))
    narrower = hidden * fewer // heads
    if free:
        cut.values["head_dim"] = cut.values["head_dim"] or hidden // heads
        narrower = min(hidden, WIDTH)
    cut.set("num_attention_heads", fewer)
    cut.set("num_key_value_heads", fewer_key_heads)
    for key, value in cut.values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value == hidden and re.search(r"hidden|dim|size|width|n_embd|d_model", key) and "vocab" not in key:
            cut.values[key] = narrower
        elif _WIDTH.search(key):
            cut.values[key] = min(value, INNER_WIDTH)


def _cut_experts(cut: _Cut) -> None:
    groups = cut.get("n_group") or 1
    most = max(EXPERTS, 2 * groups)
    for name in EXPERT_COUNTS:
        value = cut.get(name)
        if isinstance(value, int) and value > most:
            cut.set(name, most // groups * groups)
            active = (cut.get("topk_group") or groups) * (most // groups)
            for key in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"):
                if isinstance(cut.get(key), int):
                    cut.set(key, min(cut.get(key), max(active // 2, 1)))


def _lower_thresholds(cut: _Cut) -> None:
    """Everything that changes what a token sees, or where it is, from some distance on. A window that no sequence of
    the model can exceed changes nothing and stays."""
    context = cut.get("max_position_embeddings")

    def lower(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                if all(isinstance(own, str) for own in value):  # not labels by number
                    lower(value)
            elif isinstance(value, list) and _is_threshold(key):
                values[key] = [lowered(own) for own in value]
            elif key == "original_max_position_embeddings" and isinstance(value, int):
                values[key] = min(value, ORIGINAL_CONTEXT)
            elif _is_threshold(key):
                values[key] = lowered(value)
            elif "softcap" in key and isinstance(value, int | float):
                values[key] = min(value, SOFT_CAP)

    def lowered(value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return min(value, WINDOW) if is_number and 0 < value < context else value

    lower(cut.values)
    cut.set("max_position_embeddings", min(context, CONTEXT))


def _is_threshold(key: str) -> bool:
    return bool(_THRESHOLD.search(key)) and not _NO_THRESHOLD.search(key)


def _move_special_tokens(cut: _Cut, vocabulary: int) -> None:
    """Ids with a meaning of their own go to the end of the vocabulary, which the trial does not draw from."""
    places = iter(range(vocabulary - 1, -1, -1))
    for key, value in cut.values.items():
        if re.search(r"token(_id|_index)?$|_idx$", key):
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                cut.values[key] = next(places)
            elif isinstance(value, list):
                cut.values[key] = [next(places) for _ in value]
