"""Adapters that PEFT wrote: taken over exactly where we can, refused by name where we cannot."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import tiny
from stovetop.backends import local
from stovetop.backends.local import export_merged
from stovetop.engine import ops
from stovetop.errors import CheckpointError, TornCheckpoint
from stovetop.losses import CrossEntropy
from stovetop.saved_states import describe
from stovetop.target_names import HEAD, part_of, peft_name, split_peft_name
from stovetop.types import AdamParams, ModelInput

TOKENS = tiny.tokens(20, 0)


def peft_model(**changes: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(tiny.llama(), peft.LoraConfig(**settings | changes)).eval()


def saved(folder: Path, **changes: Any) -> Path:
    peft_model(**changes).save_pretrained(folder, save_embedding_layers=False)
    return folder


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> list[float]:
    logits_TV = model(torch.tensor([TOKENS[:-1]]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_modules": "all-linear", "r": 3},
        {"target_modules": ["gate_proj", "lm_head"]},
        {"use_rslora": True},
        {"layers_to_transform": [1], "lora_dropout": 0.1},
    ],
)
def test_an_adapter_of_peft_gives_our_engine_pefts_logprobs(changes: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / "theirs", **changes)
    engine = tiny.engine()
    adapter = tiny.load(engine, path, with_optimizer=False)
    output = tiny.run(engine, ops.Forward(adapter, [tiny.datum(TOKENS)], CrossEntropy()))
    expected = logprobs(peft_model(**changes))
    assert output.loss_fn_outputs[0]["logprobs"].data == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(expected, logprobs(tiny.llama()), strict=True)) > 1e-3


def test_the_parts_that_it_trains_are_read_from_its_tensors(tmp_path: Path) -> None:
    lora = describe(saved(tmp_path / "a", target_modules=["v_proj", "lm_head"])).lora
    assert (lora.rank, lora.alpha, lora.train_attn, lora.train_mlp, lora.train_unembed) == (4, 12, True, False, True)


def test_it_is_a_starting_point_for_training_and_for_sampling(tmp_path: Path) -> None:
    base = str(tiny.save_model(tmp_path / "base"))
    path = str(saved(tmp_path / "theirs"))
    config = tmp_path / "theirs" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
    with local.open_service(storage=tmp_path, threads=1) as service:
        sampler = service.create_sampling_client(model_path=path)
        before = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
        assert before[1:] == pytest.approx(logprobs(peft_model()), abs=1e-5)
        trainer = service.create_training_client_from_state(path)
        trainer.forward_backward([tiny.datum(TOKENS)], "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=1e-2))
        state = trainer.save_state("stepped").result().path
        trained = load_file(Path(state) / "adapter_model.safetensors")
        theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
        assert trained.keys() == theirs.keys()  # what it trained before, and nothing else
        assert all(not torch.equal(trained[name], theirs[name]) for name in trained)
        with pytest.raises(CheckpointError, match="without an optimizer"):
            service.create_training_client_from_state_with_optimizer(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        describe(saved(tmp_path / "theirs", **changes))


def damaged(folder: Path, name: str, value: float, *, row: int = 0) -> Path:
    """The same file with one number changed."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[name][row, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors", metadata)
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_the_factor_that_has_them(tmp_path: Path, value: float) -> None:
    path = damaged(saved(tmp_path / "theirs"), peft_name("model.layers.1.self_attn.v_proj", "B"), value)
    name = ops.AdapterId("a")
    for op in (ops.LoadAdapter(name, path, with_optimizer=False), ops.LoadWeights(ops.WeightsId("w"), path)):
        with pytest.raises(CheckpointError, match=r"NaN or infinity in model\.layers\.1\.self_attn\.v_proj\.B"):
            tiny.run(tiny.engine(), op)


HEAD_ON_BASE = "base_model.model.lm_head.base_layer.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_peft_saves_beside_its_adapter_is_compared_with_the_models(tmp_path: Path, tied: bool) -> None:
    base = str(tiny.save_model(tmp_path / "base", tiny.llama(tie_word_embeddings=tied)))
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    theirs = peft.get_peft_model(tiny.llama(tie_word_embeddings=tied), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")  # by default with the head of the base model
    assert HEAD_ON_BASE in load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    config = tmp_path / "theirs" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
    with local.open_service(storage=tmp_path, threads=1) as service:
        sampler = service.create_sampling_client(model_path=str(tmp_path / "theirs"))
        scored = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()[1:]
        assert scored == pytest.approx(logprobs(theirs), abs=1e-5)
        export_merged(str(tmp_path / "theirs"), str(tmp_path / "merged"))
        damaged(tmp_path / "theirs", HEAD_ON_BASE, 0.5, row=7)
        with pytest.raises(Exception, match="not the base model's head"):
            service.create_sampling_client(model_path=str(tmp_path / "theirs")).result()
    with pytest.raises(CheckpointError, match="not the base model's head"):
        export_merged(str(tmp_path / "theirs"), str(tmp_path / "more"))


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "{",
        '{"peft_type": "LORA"}',
        '{"peft_type": "LORA", "r": "8", "lora_alpha": 1}',
        '{"peft_type": "LORA", "r": 4}',
    ],
)
def test_a_config_that_says_too_little_is_refused(tmp_path: Path, config: str) -> None:
    (saved(tmp_path / "theirs") / "adapter_config.json").write_text(config)
    with pytest.raises(CheckpointError, match="adapter_config"):
        describe(tmp_path / "theirs")


def test_a_setting_that_came_after_us_is_refused_unless_it_is_off(tmp_path: Path) -> None:
    path = saved(tmp_path / "theirs")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"new_off": None, "also_off": []}))
    describe(path)
    (path / "adapter_config.json").write_text(json.dumps(config | {"warp_factor": 9}))
    with pytest.raises(CheckpointError, match="warp_factor=9"):
        describe(path)


def test_an_adapter_of_another_model_is_refused_by_the_linear_that_does_not_fit(tmp_path: Path) -> None:
    other = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(tiny.llama(hidden_size=32, head_dim=16), other).save_pretrained(tmp_path / "narrow")
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.q_proj.A is \(4, 32\).*needs \(4, 64\)"):
        tiny.load(tiny.engine(), tmp_path / "narrow", with_optimizer=False)
    peft.get_peft_model(tiny.llama(num_hidden_layers=3), other).save_pretrained(tmp_path / "deep")
    with pytest.raises(CheckpointError, match=r"no linear 'model.layers.2.self_attn.q_proj'"):
        tiny.load(tiny.engine(), tmp_path / "deep", with_optimizer=False)


def test_a_damaged_file_is_torn(tmp_path: Path) -> None:
    path = saved(tmp_path / "theirs")
    tensors = load_file(path / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), path / "adapter_model.safetensors")
    with pytest.raises(TornCheckpoint, match="one factor of two"):
        describe(path)
    (path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(TornCheckpoint, match="damaged"):
        describe(path)


@given(st.lists(st.sampled_from(["model", "layers", "0", "lora_A", "base_model", "weight", "q_proj"]), min_size=1))
def test_a_name_survives_the_way_to_peft_and_back(pieces: list[str]) -> None:
    target = ".".join(pieces)
    for factor in ("A", "B"):
        assert split_peft_name(peft_name(target, factor)) == (target, factor)


def test_a_linear_belongs_to_the_part_that_its_name_says() -> None:
    assert part_of(HEAD) == "unembed"
    assert part_of("model.layers.0.self_attn.q_proj") == part_of("transformer.h.0.attention.dense") == "attn"
    assert part_of("model.layers.0.mlp.up_proj") == "mlp"


def test_an_adapter_that_names_no_base_model_asks_for_one(tmp_path: Path) -> None:
    base = str(tiny.save_model(tmp_path / "base"))
    path = saved(tmp_path / "theirs")
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with local.open_service(storage=tmp_path, threads=1) as service:
        for create in (service.create_training_client_from_state, service.create_sampling_client):
            with pytest.raises(CheckpointError, match=r"names no base model; pass base_model="):
                create(str(path))
        service.create_training_client_from_state(str(path), base_model=base).result()
